"""Reading a cluster: specs, files, and the errors that bad ones give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ds_autoplan.cluster import load_cluster, parse_cluster
from ds_autoplan.cluster.presets import device_table, topology_from_json, topology_to_json
from ds_autoplan.errors import BadInputError

NEEDED = """V100-SXM2-32GB A100-SXM-40GB A100-SXM-80GB A100-PCIe-80GB A800-SXM-80GB H100-SXM-80GB
H100-PCIe H100-NVL H800-SXM-80GB H200-SXM-141GB B200 B300 GB200 GB300 MI300X MI325X MI355X RTX3090
RTX4090 TITAN-Xp L40S A10G T4 CPU""".split()


@pytest.mark.parametrize("name", NEEDED)
def test_every_needed_device_has_facts_and_a_source(name: str) -> None:
    facts = device_table()[name]
    assert facts["source"]
    topology = parse_cluster(f"2x4x{name}")
    device = topology.device
    assert device.memory_bytes > 1e9 and device.peak_flops and device.memory_bytes_per_s > 1e9
    assert all(device.matmul_flops[key] <= device.peak_flops[key] for key in device.matmul_flops)
    assert topology.num_devices == 8


def test_options_set_the_network() -> None:
    slow = parse_cluster("2x8xH100-SXM-80GB,nic=100Gb").levels[-1].bytes_per_s
    fast = parse_cluster("2x8xH100-SXM-80GB,nic=400Gb").levels[-1].bytes_per_s
    node = parse_cluster("2x8xH100-SXM-80GB,nics=8x100Gb").levels[-1].bytes_per_s
    thin = parse_cluster("2x8xH100-SXM-80GB,nic=400Gb,oversubscription=4").levels[-1].bytes_per_s
    assert fast == 4 * slow and node == slow and thin == pytest.approx(slow)


def test_an_nvlink_domain_spans_nodes() -> None:
    topology = parse_cluster("64x4xGB200")
    assert [level.size for level in topology.levels] == [64, 256]


def test_a_pcie_box_has_two_sockets() -> None:
    topology = parse_cluster("1x8xA100-PCIe-80GB")
    assert [level.size for level in topology.levels] == [4, 8]
    assert topology.levels[0].bytes_per_s > topology.levels[1].bytes_per_s


def test_a_cluster_file_may_have_any_number_of_levels(tmp_path: Path) -> None:
    path = tmp_path / "lab.json"
    levels = [
        {"name": "node", "size": 8, "gb_per_s": 232, "latency_us": 2},
        {"name": "rack", "size": 64, "gb_per_s": 24, "latency_us": 8},
        {"name": "cluster", "size": 512, "gb_per_s": 6, "latency_us": 12},
    ]
    path.write_text(json.dumps({"name": "lab", "device": "A100-SXM-80GB", "levels": levels}))
    topology = parse_cluster(str(path))
    assert topology.num_devices == 512 and topology.name == "lab"
    assert topology.span(64, 4) == (2, 8, 4)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("4x8", "NODESxGPUSxDEVICE"),
        ("4x8xH100-SXM-80G", "Did you mean 'H100-SXM-80GB'?"),
        ("0x8xA100-SXM-80GB", "Both counts must be >= 1"),
        ("4x8xA100-SXM-80GB,nic=fast", "For example nic=400Gb"),
        ("4x8xA100-SXM-80GB,speed=1", "Known options: nic, nics, oversubscription"),
        ("nowhere.json", "does not exist"),
    ],
)
def test_bad_specs_name_value_rule_and_remedy(spec: str, message: str) -> None:
    with pytest.raises(BadInputError) as caught:
        parse_cluster(spec)
    assert message in str(caught.value) and caught.value.exit_status == 2


def test_levels_must_nest(tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    levels = [
        {"name": n, "size": s, "gb_per_s": 1, "latency_us": 1} for n, s in (("a", 8), ("b", 12))
    ]
    path.write_text(json.dumps({"device": "A100-SXM-80GB", "levels": levels}))
    with pytest.raises(BadInputError, match="do not nest"):
        load_cluster(path)


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("device", "name"), 5, "name is 5"),
        (("device", "architecture"), ["hopper"], "architecture is"),
        (("device", "memory_gib"), 1e300, "memory_gib is 1e\\+300"),
        (("device", "memory_tb_s"), 1e-300, "memory_tb_s is 1e-300"),
        (("device", "peak_tflops"), {"bf16": 1e200}, "peak_tflops for bf16"),
        (("levels", 0, "latency_us"), 1e200, "latency_us is 1e\\+200"),
        (("levels", 0, "gb_per_s"), 1e-200, "gb_per_s is 1e-200"),
    ],
)
def test_a_mistaken_unit_is_named(place: tuple[Any, ...], value: object, said: str) -> None:
    data = topology_to_json(parse_cluster("1x8xH100-SXM-80GB"))
    at: Any = data
    for key in place[:-1]:
        at = at[key]
    at[place[-1]] = value
    with pytest.raises(BadInputError, match=said):
        topology_from_json(data)
