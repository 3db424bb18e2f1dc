"""The Plan: the whole answer, as plain data. The only thing that crosses from planning to running.

A plan is a JSON file that can be read, diffed, pinned (``"autoplan": {"plan": "plan.json"}``) and
hashed. Its `fingerprint` covers everything that decides what runs (degrees, cut, strategies), not
the solver's times, so the same decision has the same fingerprint on every machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from ds_autoplan.errors import BadInputError
from ds_autoplan.plan_check import check_plan
from ds_autoplan.reading import MALFORMED, read_object
from ds_autoplan.strategy import Degrees, Strategy
from ds_autoplan.writing import write_whole

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class StagePlan:
    """One pipeline stage: layers `first_layer`..`last_layer`, both included.

    Interleaved (vpp > 1), these count the layers stage by stage; which they are is what each
    layer's own `stage` says.

    `time_s` is forward plus backward of one micro-batch; `peak_bytes` is per rank; `memory`
    itemises it (parameters, gradients, optimizer, activations, workspace, overhead; bytes per
    rank).
    """

    first_layer: int
    last_layer: int
    time_s: float
    peak_bytes: int
    memory: dict[str, int]
    margin_bytes: int = 0


@dataclass(frozen=True)
class LayerPlan:
    """One layer's place and strategy; `name` is the module's dotted name where known."""

    index: int
    name: str
    stage: int
    strategy: Strategy


@dataclass(frozen=True)
class SolverReport:
    """What the solver said of itself: status, bound and gap, and the work done.

    `seconds` is the search's own time; None in a saved plan, whose bytes are the same each time.
    """

    status: str
    objective_s: float
    bound_s: float
    gap: float
    seconds: float | None
    candidates: int
    solved: int
    pruned: int


@dataclass(frozen=True)
class Plan:
    """A solved plan. Units are in the names; see INTERFACE in the README for the JSON.

    `vocabulary` is "shard" (word embedding and head split over tp by rows, padded to a multiple of
    tp) or "replicate".
    """

    model: str
    degrees: Degrees
    seq_length: int
    global_batch_size: int
    precision: str
    backend: str
    vocabulary: str
    stages: tuple[StagePlan, ...]
    layers: tuple[LayerPlan, ...]
    step_s: float
    tokens_per_s: float
    tokens_per_s_per_gpu: float
    mfu: float
    uncalibrated_fraction: float
    breakdown_s: dict[str, float]
    solver: SolverReport
    cluster: dict[str, Any] = field(default_factory=dict)
    assumptions: tuple[str, ...] = ()
    alternatives: tuple[dict[str, Any], ...] = ()
    excluded: tuple[dict[str, Any], ...] = ()
    report: dict[str, Any] = field(default_factory=dict)

    @property
    def stage_bounds(self) -> list[tuple[int, int]]:
        """(first, last + 1) layer of each stage."""
        return [(stage.first_layer, stage.last_layer + 1) for stage in self.stages]

    @property
    def fingerprint(self) -> str:
        """Hash (16 hex digits) of all that decides what runs."""
        decided = {
            "degrees": asdict(self.degrees),
            "stages": self.stage_bounds,
            "layers": [asdict(layer.strategy) for layer in self.layers],
            "vocabulary": self.vocabulary,
        }
        text = json.dumps(decided, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def deepspeed(self) -> dict[str, Any]:
        """The script's batch settings that suit the plan, as plain data parallelism sees them.

        `train_micro_batch_size_per_gpu` * `gradient_accumulation_steps` * world size is the global
        batch size; accumulation 1 runs one full pipeline pass a step, and is what they say unless
        the plan was made for more. The micro-batch size is None where the global batch is no whole
        number of samples for each rank and call: no such script exists.
        """
        inputs = self.report.get("inputs")
        workload = inputs.get("workload", {}) if isinstance(inputs, dict) else {}
        calls = int(workload.get("gradient_accumulation_steps") or 1)
        per_rank, rest = divmod(self.global_batch_size, self.degrees.world_size * calls)
        return {
            "train_batch_size": self.global_batch_size,
            "train_micro_batch_size_per_gpu": None if rest else per_rank,
            "gradient_accumulation_steps": calls,
            "zero_optimization": {"stage": self.degrees.zero_stage},
        }

    def to_json(self) -> dict[str, Any]:
        """The plan as the JSON object `{"plan", "alternatives", "excluded"}` of `plan --json`."""
        head: dict[str, Any] = asdict(self.degrees)
        for item in fields(self):
            if item.name not in ("degrees", "layers", "alternatives", "excluded"):
                value = getattr(self, item.name)
                head[item.name] = _plain(value)
        head["layers"] = [
            {
                "index": layer.index,
                "name": layer.name,
                "stage": layer.stage,
                "sharding": {"attention": layer.strategy.attention, "mlp": layer.strategy.mlp},
                "sequence_parallel": layer.strategy.sequence_parallel,
                "activation_checkpointing": layer.strategy.activation_checkpointing,
            }
            for layer in self.layers
        ]
        head["fingerprint"] = self.fingerprint
        head["schema_version"] = SCHEMA_VERSION
        head["deepspeed"] = self.deepspeed()
        return {
            "plan": head,
            "alternatives": list(self.alternatives),
            "excluded": list(self.excluded),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Plan:
        """Rebuild a plan from :meth:`to_json`'s object.

        Raises:
            BadInputError: a key is missing or the schema is another version's.
        """
        if "plan" not in data:
            raise BadInputError(
                f"The file holds {', '.join(sorted(map(str, data))) or 'nothing'}, and no plan.",
                "A plan file is what `ds-autoplan plan --out` wrote.",
                "Name that file.",
            )
        try:
            head = data["plan"]
            version = head.get("schema_version")
            if version != SCHEMA_VERSION:
                raise BadInputError(
                    f"The plan has schema_version {version!r};",
                    f"this version of ds_autoplan reads {SCHEMA_VERSION}.",
                    "Make the plan again with `ds-autoplan plan`.",
                )
            plain = {
                item.name: head[item.name]
                for item in fields(cls)
                if item.name
                not in ("degrees", "layers", "stages", "solver", "alternatives", "excluded")
            }
            plain["assumptions"] = tuple(plain["assumptions"])
            plan = cls(
                **plain,
                degrees=Degrees(**{item.name: head[item.name] for item in fields(Degrees)}),
                stages=tuple(StagePlan(**stage) for stage in head["stages"]),
                layers=tuple(_layer(layer) for layer in head["layers"]),
                solver=SolverReport(**head["solver"]),
                alternatives=tuple(data.get("alternatives", ())),
                excluded=tuple(data.get("excluded", ())),
            )
            check_plan(plan)
        except MALFORMED as error:
            raise BadInputError(
                f"The plan cannot be read: {error}.",
                "A plan file is what `ds-autoplan plan --out` wrote.",
                "Make it again, or compare it with a fresh one.",
            ) from error
        stated = head.get("fingerprint")
        if stated != plan.fingerprint:
            raise BadInputError(
                f"The plan states fingerprint {stated!r} but its content hashes to "
                f"{plan.fingerprint!r}.",
                "A plan may not be edited by hand without its fingerprint.",
                "Pin the degrees you want and make the plan again.",
            )
        return plan

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan file.

        Raises:
            BadInputError: the file is missing, not JSON, or not a plan.
        """
        if not os.path.exists(path):  # unlike Path's, false for what no path can be
            raise BadInputError(
                f"The plan file {str(path)!r} does not exist.",
                "",
                "Write one with `ds-autoplan plan ... --out FILE`.",
            )
        data = read_object(path, "plan file")
        return cls.from_json(data)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, the same bytes for the same plan (no seconds of search).

        Raises:
            BadInputError: it cannot be written; what was there is as it was.
        """
        lasting = replace(self, solver=replace(self.solver, seconds=None))
        text = json.dumps(lasting.to_json(), indent=1, sort_keys=True)
        write_whole(path, text + "\n", "plan file")

    def with_degrees(self, **changes: Any) -> Plan:
        """A copy with some degrees replaced (for tests and what-if tools; nothing is re-priced)."""
        return replace(self, degrees=replace(self.degrees, **changes))


def _plain(value: Any) -> Any:
    if hasattr(value, "__dataclass_fields__"):
        return asdict(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def _layer(data: dict[str, Any]) -> LayerPlan:
    strategy = Strategy(
        attention=data["sharding"]["attention"],
        mlp=data["sharding"]["mlp"],
        sequence_parallel=data["sequence_parallel"],
        activation_checkpointing=data["activation_checkpointing"],
    )
    return LayerPlan(data["index"], data["name"], data["stage"], strategy)


class _PlanModule(ModuleType):
    """This module, callable: `ds_autoplan.plan(model, cluster, workload)` makes a plan.

    The package's function has the name of this module, and importing a module puts it under its
    name into its package; so the module itself passes the call on to :func:`ds_autoplan.api.plan`.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Plan:
        """See :func:`ds_autoplan.api.plan`."""
        from ds_autoplan.api import plan

        return plan(*args, **kwargs)


sys.modules[__name__].__class__ = _PlanModule
