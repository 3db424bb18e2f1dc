"""From "4x8xH100-SXM-80GB,nic=400Gb" or a cluster JSON to a :class:`Topology`.

Device facts live in data/devices.json, each with its source. Cluster JSON::

    {"name": "lab", "device": "A100-SXM-80GB" | {"name": ..., "architecture": ..., ...},
     "gpus_per_node": 8,
     "levels": [{"name": "node", "size": 8, "gb_per_s": 232, "latency_us": 3},
                {"name": "cluster", "size": 32, "gb_per_s": 24, "latency_us": 8}]}

`levels` may be left out where "nodes" is given; then the device's usual node is taken.
"""

from __future__ import annotations

import difflib
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from ds_autoplan.cluster.topology import Device, Level, Topology
from ds_autoplan.errors import BadInputError
from ds_autoplan.reading import MALFORMED, count, number, read_object, text, within

GIB = 2**30
# What a cluster JSON may state, with room to every real machine: beyond, a unit was mistaken.
MEMORY_GIB, MEMORY_TB_S, TFLOPS = (1e-3, 1e5), (1e-6, 1e4), (1e-6, 1e7)
GB_S, HOP_US, OVERSUBSCRIPTION = (1e-6, 1e6), (0.0, 1e7), (1e-3, 1e3)
MOST_DEVICES = 1_000_000  # the largest clusters have a tenth of it
# Per-hop latencies with NCCL's protocol cost. NVLink: 8-GPU all-reduce fits of 23 to 59 us over 14
# hops (NVIDIA/dgxc-benchmarking@841f546 nccl/README.md, stas00/ml-engineering@744d01e18b
# network/README.md); PCIe: MooreThreads/SimuMax@4dcaae5 configs/system/a100_pcie.json (5 to 15 us
# a collective of 2 to 8); network: common InfiniBand/EFA figure for a GPU-to-GPU hop with the
# proxy thread.
HOP_LATENCY_S = {"nvlink": 1.0e-6, "xgmi": 1.5e-6, "pcie": 3e-6, "shm": 60e-6, "network": 8e-6}
# Payload share of a NIC's line rate: 24 of 25 and 48 of 50 GB/s, stas00/ml-engineering@744d01e18b
# network/README.md ("single NIC achieved").
NIC_EFFICIENCY = 0.96
# GPUs of an NVLink domain of 72 that a job of several domains uses: whole trays, a power of two.
ALIGNED_DOMAIN = {72: 64}
_SPEC = re.compile(r"^(\d+)x(\d+)x([^,]+)((?:,[^,]+)*)$")
_ALIASES = {"V100": "V100-SXM2-32GB", "A100": "A100-SXM-80GB", "H100": "H100-SXM-80GB"}
_ALIASES.update(
    {"A100-SXM": "A100-SXM-80GB", "H100-SXM": "H100-SXM-80GB", "H100-SXM5": "H100-SXM-80GB"}
)
_ALIASES.update({"H100-PCIE-80GB": "H100-PCIe"})
_ALIASES.update({"H200-SXM": "H200-SXM-141GB", "H200-141GB": "H200-SXM-141GB"})
_ALIASES.update({"H200": "H200-SXM-141GB", "TITANXP": "TITAN-Xp", "A800": "A800-SXM-80GB"})
_ALIASES.update({"H800": "H800-SXM-80GB", "RTX-3090": "RTX3090", "RTX-4090": "RTX4090"})


@cache
def device_table() -> dict[str, dict[str, Any]]:
    """The bundled devices, as read from data/devices.json."""
    path = Path(__file__).with_name("data") / "devices.json"
    table: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return table


def _canonical(name: str) -> str:
    """A device name without what vendors and clouds add or drop: "A100-SXM4-80GB", "a100 80gb"."""
    text = re.sub(r"^(nvidia|amd)[ -]*", "", name.strip().lower())
    text = re.sub(r"[ _-]+", "-", text).removesuffix("-hbm3")
    text = re.sub(r"(sxm|nvl)\d", r"\1", text)
    return re.sub(r"-(sxm|oam)(?=-|$)", "", text)


@cache
def _canonical_names() -> dict[str, str]:
    return {_canonical(name): name for name in device_table()}


def device_facts(name: str) -> dict[str, Any]:
    """The bundled facts of device `name` (case does not matter).

    Raises:
        BadInputError: no such device; names the nearest.
    """
    table = device_table()
    wanted = _ALIASES.get(name.upper(), name)
    known = _canonical_names().get(_canonical(wanted))
    if known is not None:
        return {"name": known, **table[known]}
    near = difflib.get_close_matches(wanted.upper(), [item.upper() for item in table], 1, 0.3)
    hint = next((item for item in table if near and item.upper() == near[0]), "H100-SXM-80GB")
    raise BadInputError(
        f"The device {name!r} is not known.",
        f"Known devices: {', '.join(table)}.",
        f"Did you mean {hint!r}? A cluster JSON can describe any other.",
    )


def build_device(facts: dict[str, Any]) -> Device:
    """A :class:`Device` from a row of devices.json (or the "device" object of a cluster JSON)."""
    try:
        memory = within(facts["memory_gib"], "The device's memory_gib", *MEMORY_GIB)
        rate = within(facts["memory_tb_s"], "The device's memory_tb_s", *MEMORY_TB_S)
        return Device(
            name=text(facts["name"], "The device's name"),
            architecture=text(facts["architecture"], "The device's architecture"),
            multiprocessors=count(facts["multiprocessors"], "The device's multiprocessors"),
            memory_bytes=int(memory * GIB),
            memory_bytes_per_s=rate * 1e12,
            peak_flops=_flops(facts, "peak_tflops"),
            matmul_flops=_flops(facts, "matmul_tflops") if "matmul_tflops" in facts else {},
            source=facts.get("source", ""),
        )
    except MALFORMED as error:
        raise BadInputError(
            f"The device description lacks or misstates {error}.",
            "It needs name, architecture, multiprocessors, memory_gib, memory_tb_s, peak_tflops.",
        ) from error


def _flops(facts: dict[str, Any], key: str) -> dict[str, float]:
    return {
        name: within(rate, f"The device's {key} for {name}", *TFLOPS) * 1e12
        for name, rate in facts[key].items()
    }


def build_topology(
    nodes: int,
    gpus_per_node: int,
    device_name: str,
    nic_gbit: float | None = None,
    oversubscription: float = 1.0,
    name: str = "",
) -> Topology:
    """The usual cluster of `nodes` x `gpus_per_node` devices.

    Args:
        nodes: number of nodes.
        gpus_per_node: devices in each.
        device_name: a bundled device.
        nic_gbit: network per device in Gb/s; None: what the device's usual node has.
        oversubscription: how much less than the NICs the network beyond a node carries.
        name: display name.
    """
    facts = device_facts(device_name)
    total = count(nodes, "The number of nodes") * count(gpus_per_node, "The devices of a node")
    count(total, "The number of devices", MOST_DEVICES)
    hop = HOP_LATENCY_S[facts["link"]]
    inside = gpus_per_node
    domain = facts.get("nvlink_domain", 0)
    if domain:
        inside = min(total, ALIGNED_DOMAIN.get(domain, domain)) if total > domain else total
    levels = []
    if facts.get("socket_gb_s") and inside > 4:
        levels.append(Level("socket", 4, facts["socket_gb_s"] * 1e9, hop))
    node_gb_s = facts["bus_gb_s"]
    if facts.get("socket_gb_s") and inside <= 4:
        node_gb_s = facts["socket_gb_s"]
    levels.append(
        Level(
            "node" if inside == gpus_per_node else "nvlink domain",
            inside,
            node_gb_s * 1e9,
            hop,
            facts.get("all_reduce_gb_s", 0) * 1e9,
            facts.get("all_to_all_gb_s", 0) * 1e9,
            facts.get("pair_gb_s", 0) * 1e9 if facts["link"] == "xgmi" else 0.0,
        )
    )
    if total > inside:
        gbit = facts["nic_gbit"] if nic_gbit is None else nic_gbit
        rate = within(gbit, "The network's Gb/s per device", *(8 * edge for edge in GB_S))
        per_device = rate / 8 * 1e9 * NIC_EFFICIENCY
        per_device /= within(oversubscription, "The oversubscription", *OVERSUBSCRIPTION)
        levels.append(Level("cluster", total, per_device, HOP_LATENCY_S["network"]))
    return Topology(
        device=build_device(facts),
        levels=tuple(levels),
        name=name or f"{nodes}x{gpus_per_node}x{facts['name']}",
        gpus_per_node=gpus_per_node,
    )


def parse_cluster(spec: str) -> Topology:
    """Read a cluster: a spec or a cluster JSON file.

    A spec is "NODESxGPUSxDEVICE[,nic=400Gb][,nics=4x100Gb][,oversubscription=2]":
    `nic` is the network of one GPU, `nics` what one node has for all its GPUs.

    Raises:
        BadInputError: neither a known form nor a readable cluster JSON.
    """
    stated = spec.strip()
    if len(stated) > 4096:  # longer than any path; the system would raise
        raise BadInputError("The cluster's description is longer than any path.")
    if stated.endswith(".json") or Path(stated).is_file():
        return load_cluster(Path(stated))
    match = _SPEC.match(stated)
    if not match:
        raise BadInputError(
            f"The cluster {spec!r} cannot be read.",
            "A cluster is NODESxGPUSxDEVICE or a cluster JSON file.",
            "For example 4x8xH100-SXM-80GB or 4x8xA100-SXM-80GB,nic=200Gb.",
        )
    nodes, gpus = int(match.group(1)), int(match.group(2))
    if nodes < 1 or gpus < 1:
        raise BadInputError(f"The cluster {spec!r} has no devices.", "Both counts must be >= 1.")
    nic: float | None = None
    oversubscription = 1.0
    for option in filter(None, match.group(4).split(",")):
        key, _, value = option.partition("=")
        if key == "nic":
            nic = _gbit(value, spec)
        elif key == "nics":
            nics, _, rate = value.partition("x")
            nic = number(nics, f"The number of NICs in {spec!r}") * _gbit(rate, spec) / gpus
        elif key == "oversubscription":
            oversubscription = number(value, f"The oversubscription in {spec!r}")
        else:
            raise BadInputError(
                f"The cluster option {option!r} in {spec!r} is not known.",
                "Known options: nic, nics, oversubscription.",
            )
    return build_topology(nodes, gpus, match.group(3), nic, oversubscription, stated)


def load_cluster(path: Path) -> Topology:
    """Read a cluster JSON; see the module's docstring for its form.

    Raises:
        BadInputError: missing file, bad JSON, or missing keys.
    """
    data = read_object(path, "cluster file")
    return topology_from_json(data)


def topology_from_json(data: dict[str, Any]) -> Topology:
    """A :class:`Topology` from a cluster JSON's object.

    Raises:
        BadInputError: a key is missing or levels do not nest.
    """
    device = data.get("device", "")
    if "levels" not in data:
        if not isinstance(device, str) or "nodes" not in data or "gpus_per_node" not in data:
            raise BadInputError(
                "The cluster JSON has no levels.",
                'It needs "levels", or a bundled "device" with "nodes" and "gpus_per_node".',
            )
        return build_topology(
            data["nodes"],
            data["gpus_per_node"],
            device,
            data.get("nic_gbit"),
            data.get("oversubscription", 1.0),
            str(data.get("name", "")),
        )
    facts = device_facts(device) if isinstance(device, str) else device
    try:
        levels = tuple(
            Level(
                name=str(level["name"]),
                size=count(level["size"], "A level's size", MOST_DEVICES),
                bytes_per_s=within(level["gb_per_s"], "A level's gb_per_s", *GB_S) * 1e9,
                latency_s=within(level["latency_us"], "A level's latency_us", *HOP_US) * 1e-6,
                all_reduce_bytes_per_s=_rate(level, "all_reduce_gb_per_s"),
                all_to_all_bytes_per_s=_rate(level, "all_to_all_gb_per_s"),
                pair_bytes_per_s=_rate(level, "pair_gb_per_s"),
            )
            for level in data["levels"]
        )
    except MALFORMED as error:
        raise BadInputError(
            f"A level of the cluster JSON lacks or misstates {error}.",
            "Each level needs name, size, gb_per_s and latency_us.",
        ) from error
    sizes = [level.size for level in levels]
    if not sizes or any(b % a or b <= a for a, b in zip(sizes, sizes[1:], strict=False)):
        raise BadInputError(
            f"The level sizes {sizes} do not nest.",
            "Each level's size must be a larger multiple of the one before.",
        )
    return Topology(
        device=build_device(facts),
        levels=levels,
        name=str(data.get("name", facts["name"])),
        gpus_per_node=count(data.get("gpus_per_node", sizes[0]), "gpus_per_node"),
        calibrated=bool(data.get("calibrated", False)),
    )


def topology_to_json(topology: Topology) -> dict[str, Any]:
    """A topology as a cluster JSON's object: what :func:`topology_from_json` reads."""
    device = topology.device
    return {
        "name": topology.name,
        "device": {
            "name": device.name,
            "architecture": device.architecture,
            "multiprocessors": device.multiprocessors,
            "memory_gib": device.memory_bytes / GIB,
            "memory_tb_s": device.memory_bytes_per_s / 1e12,
            "peak_tflops": {key: rate / 1e12 for key, rate in device.peak_flops.items()},
            "matmul_tflops": {key: rate / 1e12 for key, rate in device.matmul_flops.items()},
            "source": device.source,
        },
        "gpus_per_node": topology.gpus_per_node,
        "calibrated": topology.calibrated,
        "levels": [
            {
                "name": level.name,
                "size": level.size,
                "gb_per_s": level.bytes_per_s / 1e9,
                "latency_us": level.latency_s * 1e6,
                "all_reduce_gb_per_s": level.all_reduce_bytes_per_s / 1e9,
                "all_to_all_gb_per_s": level.all_to_all_bytes_per_s / 1e9,
                "pair_gb_per_s": level.pair_bytes_per_s / 1e9,
            }
            for level in topology.levels
        ],
    }


def _gbit(text: str, spec: str) -> float:
    match = re.match(r"^([\d.]+)\s*(Gb|Gbit|G)?$", text, re.IGNORECASE)
    if not match:
        raise BadInputError(
            f"The network rate {text!r} in {spec!r} cannot be read.",
            "A rate is a number of gigabits per second.",
            "For example nic=400Gb.",
        )
    return number(match.group(1), f"The network rate {text!r} in {spec!r}")


def _rate(level: dict[str, Any], key: str) -> float:
    return within(level.get(key, 0), f"A level's {key}", 0.0, GB_S[1]) * 1e9
