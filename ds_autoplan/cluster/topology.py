"""The machine, as planning sees it: one kind of device and the link levels between devices.

Level 0 joins the devices nearest each other (a node's NVSwitch, a PCIe root), every further level
joins groups of the one before (nodes over NICs, racks over an oversubscribed switch). A level's
bandwidth is what one device gets when all devices use it at once, in bytes per second per
direction; a group that has k members below a level may use the shares of all k.

Rank order: device r sits in group r // size of each level. An axis of degree q and stride s (the
product of the degrees inside it) therefore covers q_l ways at level l, with q = prod(q_l); see
:meth:`Topology.span`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ds_autoplan.strategy import Degrees


@dataclass(frozen=True)
class Device:
    """One accelerator (or one CPU process).

    `peak_flops` and `matmul_flops` (largest measured in a long matmul run) are FLOP/s by precision
    ("bf16", "fp16", "fp8", "fp4", "fp32"), dense. `memory_bytes` is what a process can allocate.
    """

    name: str
    architecture: str
    multiprocessors: int
    memory_bytes: int
    memory_bytes_per_s: float
    peak_flops: dict[str, float] = field(hash=False)
    matmul_flops: dict[str, float] = field(hash=False)
    source: str = ""


@dataclass(frozen=True)
class Level:
    """One level of links.

    Attributes:
        name: "node", "socket", "rack", "cluster", ...
        size: devices that one group of this level holds.
        bytes_per_s: achieved bandwidth per device and direction, all devices active.
        latency_s: time of one hop, software included.
        all_reduce_bytes_per_s: bus bandwidth of an all-reduce with in-network reduction (NVLS), 0:
            none.
        all_to_all_bytes_per_s: bandwidth per device of an all-to-all, 0: as `bytes_per_s`.
        pair_bytes_per_s: what two devices alone get on a mesh of links, 0: the links are switched.
    """

    name: str
    size: int
    bytes_per_s: float
    latency_s: float
    all_reduce_bytes_per_s: float = 0.0
    all_to_all_bytes_per_s: float = 0.0
    pair_bytes_per_s: float = 0.0


@dataclass(frozen=True)
class Topology:
    """A cluster of equal devices; `levels` go from the inside out, the last one holds all."""

    device: Device
    levels: tuple[Level, ...]
    name: str = ""
    gpus_per_node: int = 1
    calibrated: bool = False

    @property
    def num_devices(self) -> int:
        """Devices in the whole cluster."""
        return self.levels[-1].size

    def span(self, degree: int, stride: int = 1) -> tuple[int, ...]:
        """Ways an axis of `degree` and `stride` covers at each level; they multiply to `degree`.

        On 2 x 8 devices, degree 4 and stride 4 is (2, 2): two members in a node, across two nodes.
        """
        ways: list[int] = []
        covered = 1
        for level in self.levels:
            reach = min(degree, max(1, level.size // stride)) if level.size > stride else 1
            reach = max(covered, reach)
            here = -(-reach // covered)
            ways.append(here)
            covered *= here
        if covered < degree:
            ways[-1] *= -(-degree // covered)
        return tuple(ways)

    def axis_span(self, degrees: Degrees, axis: str) -> tuple[int, ...]:
        """:meth:`span` of one axis ("tp", "cp", "dp", "pp", "ep", "dp_cp") under `degrees.order`.

        "dp_cp" is the group that reduces gradients: dp and cp together. Experts lie inside it,
        next to tp, so "ep" has the stride of the inner one of the two.
        """
        degree = degrees.dp * degrees.cp if axis == "dp_cp" else int(getattr(degrees, axis))
        return self.span(degree, self.axis_stride(degrees, axis))

    def axis_stride(self, degrees: Degrees, axis: str) -> int:
        """Distance in ranks between neighbours along `axis`."""
        stride = 1
        for name in degrees.order.split("-"):
            if name == axis or (axis in ("ep", "dp_cp") and name in ("dp", "cp")):
                break
            if name != "ep":
                stride *= int(getattr(degrees, name))
        return stride

    def describe(self) -> dict[str, object]:
        """What a plan keeps of the cluster."""
        return {
            "name": self.name,
            "device": self.device.name,
            "num_devices": self.num_devices,
            "calibrated": self.calibrated,
            "levels": [
                {"name": level.name, "size": level.size, "bytes_per_s": level.bytes_per_s}
                for level in self.levels
            ],
        }
