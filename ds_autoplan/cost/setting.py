"""What a price depends on beside the layer and the degrees, and the pieces prices are made of."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ds_autoplan.cluster.collectives import START_S, collective_s, exchange_s, volume_bytes
from ds_autoplan.cluster.topology import Topology
from ds_autoplan.cost.constants import Constants
from ds_autoplan.cost.frameworks import Framework
from ds_autoplan.cost.kernels import Kernels
from ds_autoplan.cost.memory import element_bytes
from ds_autoplan.strategy import Degrees
from ds_autoplan.workload import Workload


@dataclass(frozen=True)
class Setting:
    """Everything a price depends on beside the layer and the degrees."""

    topology: Topology
    workload: Workload
    framework: Framework
    kernels: Kernels
    constants: Constants
    hidden: int
    model_type: str = ""
    volume_only: bool = False
    collectives: dict[tuple[str, float, tuple[int, ...]], float] = field(
        default_factory=dict, compare=False, repr=False
    )
    shard_group: int = 0  # ranks that ZeRO shards over; 0: all that hold the same parameters

    @property
    def element(self) -> int:
        """Bytes of an activation element."""
        return element_bytes(self.workload.precision)

    def tokens(self, degrees: Degrees) -> float:
        """Tokens of one micro-batch on one rank before sequence parallelism."""
        return self.workload.seq_length * degrees.micro_batch_size / degrees.cp

    def expert_tp(self, degrees: Degrees) -> int:
        """Ways that each expert is split."""
        return self.framework.expert_tp or degrees.tp

    def expert_span(self, degrees: Degrees) -> tuple[int, ...]:
        """Ways of the expert-parallel group at each level."""
        if self.expert_tp(degrees) == degrees.tp:
            return self.topology.axis_span(degrees, "ep")
        return self.topology.span(degrees.ep, self.expert_tp(degrees))

    def collective(self, kind: str, buffer_bytes: float, degrees: Degrees, axis: str) -> float:
        """Seconds of one collective over `axis`, all groups of the axis at the same time."""
        ways = self.topology.axis_span(degrees, axis)
        seconds = self.over(kind, buffer_bytes, ways)
        if axis == "tp" and math.prod(ways[1:]) > 1 and not self.volume_only:
            return seconds / self.constants.tensor_network_share
        return seconds

    def over(self, kind: str, buffer_bytes: float, ways: tuple[int, ...]) -> float:
        """Seconds of one collective over a group that spans `ways`."""
        if self.volume_only:
            fast = self.topology.levels[0].bytes_per_s
            return volume_bytes(kind, buffer_bytes, ways) / fast
        key = (kind, buffer_bytes, ways)
        found = self.collectives.get(key)
        if found is None:
            found = self.collectives[key] = collective_s(self.topology, kind, buffer_bytes, ways)
        return found

    def exchange(self, token_bytes: float, copies: float, degrees: Degrees) -> float:
        """Seconds of sending every token to `copies` experts' ranks."""
        ways = self.expert_span(degrees)
        if self.volume_only:
            fast = self.topology.levels[0].bytes_per_s
            return volume_bytes("all_to_all", token_bytes * copies, ways) / fast
        return START_S + exchange_s(
            self.topology, token_bytes, copies, ways, self.framework.deduplicated_dispatch
        )

    def bucketed(self, kind: str, bytes_: float, ways: tuple[int, ...]) -> float:
        """A collective over `bytes_` that runs bucket by bucket: affine in bytes."""
        bucket = self.framework.bucket_bytes
        return self.over(kind, bucket, ways) * bytes_ / bucket


@dataclass(frozen=True)
class Detail:
    """Exposed seconds by cause, beside a :class:`LayerCost`: per micro-batch, `dp_s` per step."""

    tp_s: float
    cp_s: float
    ep_s: float
    zero3_s: float
    dp_s: float
    pp_s: float = 0.0


@dataclass(frozen=True)
class Pass:
    """Seconds of one direction through a block, by cause."""

    compute_s: float
    tp_s: float
    cp_s: float
    ep_s: float
    pp_s: float = 0.0

    @property
    def communication_s(self) -> float:
        """Exposed traffic."""
        return self.tp_s + self.cp_s + self.ep_s + self.pp_s

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.compute_s + self.communication_s
