"""Parity of plans with one process: cases, the plan of each, its result.

A case trains a small model of an architecture twice: unparallelised in one process, and under a
plan in tp * pp * dp local processes. What they give must agree:

    for every loss, every gradient norm       |planned - reference| / |reference|
    for every weight tensor w                 max |planned - reference| / max |reference|

This module imports no torch; the processes that train are started by
:mod:`ds_autoplan.integrations.verification.pool`.
"""

from __future__ import annotations

import difflib
import json
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_autoplan.errors import AutoplanError, BadInputError
from ds_autoplan.model.architectures import ARCHITECTURES
from ds_autoplan.reading import read_text
from ds_autoplan.strategy import ATTENTION_SHARDINGS, CHECKPOINTING, MLP_SHARDINGS

if TYPE_CHECKING:
    from ds_autoplan.cluster import Topology
    from ds_autoplan.plan import Plan

# Largest relative differences that count as equal: (loss, gradient norm, weights). In fp32 what
# remains is the order of additions. In bf16 the reference stays in fp32 and the planned run rounds
# activations, gradients and saved weights to 8 bits of mantissa (2**-9 = 0.002 each).
TOLERANCES = {"fp32": (1e-5, 1e-4, 1e-4), "bf16": (1e-3, 2e-2, 5e-2)}
DISTURBANCES = ("", "shard", "gradient", "late", "hang")
SAMPLES_PER_RANK, SEQ_LENGTH = 2, 16


@dataclass(frozen=True)
class Case:
    """One thing to verify.

    Attributes:
        model: a config.json, a model folder, a bundled name, or a bare model type.
        tp: tensor-parallel degree.
        pp: pipeline degree.
        dp: data-parallel degree.
        zero_stage: ZeRO stage.
        sequence_parallel: whether norms and residuals are split over the sequence.
        activation_checkpointing: "none", "selective" or "full", for every layer.
        gradient_accumulation_steps: calls of the engine per step.
        steps: optimizer steps to train.
        plan: a plan file in place of the degrees above.
        config: keys of the small model's config, set as they are.
        precision: "fp32" or "bf16".
        micro_batch_size: samples that a replica runs at a time; None: what two samples from each
            rank of a stage bring.
        attention: "heads" shards attention where that is legal; "replicate" never does.
        mlp: "shard" or "replicate", likewise.
        vocabulary: "shard" or "replicate".
        seed: of weights and data.
        name: what it is called in messages.
        disturb: "" or what is done to the planned run on purpose, to test the comparison itself:
            "shard", "gradient", "late", "hang" (see `verification.planned`).
    """

    model: str
    tp: int = 1
    pp: int = 1
    dp: int = 1
    zero_stage: int = 0
    sequence_parallel: bool = False
    activation_checkpointing: str = "none"
    gradient_accumulation_steps: int = 1
    steps: int = 5
    plan: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    precision: str = "fp32"
    micro_batch_size: int | None = None
    attention: str = "heads"
    mlp: str = "shard"
    vocabulary: str = "shard"
    seed: int = 0
    name: str = ""
    disturb: str = ""

    def __post_init__(self) -> None:
        """Refuse values that no plan can have."""
        for key in ("tp", "pp", "dp", "gradient_accumulation_steps", "steps"):
            _check_integer(key, getattr(self, key), 1)
        _check_integer("seed", self.seed, 0)
        if self.micro_batch_size is not None:
            _check_integer("micro_batch_size", self.micro_batch_size, 1)
        for key, allowed in (
            ("zero_stage", (0, 1, 2, 3)),
            ("sequence_parallel", (False, True)),
            ("activation_checkpointing", CHECKPOINTING),
            ("precision", tuple(TOLERANCES)),
            ("attention", ATTENTION_SHARDINGS),
            ("mlp", MLP_SHARDINGS),
            ("vocabulary", ("shard", "replicate")),
            ("disturb", DISTURBANCES),
        ):
            value = getattr(self, key)
            if value not in allowed or isinstance(value, bool) != isinstance(allowed[0], bool):
                known = ", ".join(json.dumps(item) for item in allowed)
                raise BadInputError(f"{key} is {value!r}.", f"It must be one of {known}.")
        if not isinstance(self.model, str) or not isinstance(self.config, dict):
            raise BadInputError(
                f"model is {self.model!r} and config is {self.config!r}.",
                "The model is a string, the config an object.",
            )

    @property
    def world_size(self) -> int:
        """Processes that train."""
        return self.tp * self.pp * self.dp

    def words(self) -> str:
        """The case in one line."""
        parts = [
            Path(self.model).name,
            f"tp{self.tp} pp{self.pp} dp{self.dp} zero{self.zero_stage}",
        ]
        if self.sequence_parallel:
            parts.append("sp")
        if self.activation_checkpointing != "none":
            parts.append(self.activation_checkpointing)
        if self.gradient_accumulation_steps > 1:
            parts.append(f"accumulation {self.gradient_accumulation_steps}")
        parts += [f"{key}={value}" for key, value in self.config.items()]
        return self.name or " ".join(parts)


@dataclass(frozen=True)
class Result:
    """What a case gave; differences are None where it failed, and `error` says why."""

    case: Case
    plan: dict[str, Any] | None
    max_loss_rel_diff: float | None = None
    max_grad_norm_rel_diff: float | None = None
    max_weight_rel_diff: float | None = None
    worst_tensor: str = ""
    loss: tuple[float, ...] = ()
    reference_loss: tuple[float, ...] = ()
    error: str = ""
    details: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether everything agrees within the precision's tolerances."""
        found = (self.max_loss_rel_diff, self.max_grad_norm_rel_diff, self.max_weight_rel_diff)
        limits = TOLERANCES[self.case.precision]
        return not self.error and all(
            value is not None and value <= limit for value, limit in zip(found, limits, strict=True)
        )

    def to_json(self) -> dict[str, Any]:
        """The result as `verify --json` prints it."""
        data: dict[str, Any] = {
            "model": self.case.model,
            "name": self.case.words(),
            "plan": self.plan,
            "max_loss_rel_diff": self.max_loss_rel_diff,
            "max_grad_norm_rel_diff": self.max_grad_norm_rel_diff,
            "max_weight_rel_diff": self.max_weight_rel_diff,
            "worst_tensor": self.worst_tensor,
            "loss": list(self.loss),
            "reference_loss": list(self.reference_loss),
            "tolerances": dict(
                zip(("loss", "grad_norm", "weight"), TOLERANCES[self.case.precision], strict=True)
            ),
            "seconds": round(self.seconds, 3),
            "ok": self.ok,
        }
        if self.error:
            data |= {"error": self.error, "details": self.details}
        return data


def parse_case(data: Any, where: str) -> Case:
    """A case from a JSON object.

    Raises:
        BadInputError: an unknown key (the nearest known one is named) or a bad value; says `where`.
    """
    if not isinstance(data, dict):
        raise BadInputError(f"{where}: a case is a JSON object, not {data!r}.")
    known = [item.name for item in fields(Case)]
    for key in data:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(known)}."
            raise BadInputError(f"{where}: there is no key {key!r} in a case.", "", hint)
    if "model" not in data:
        raise BadInputError(f"{where}: the case names no model.")
    try:
        return Case(**data)
    except BadInputError as error:
        raise BadInputError(f"{where}: {error}") from error


def read_grid(path: str) -> list[Case]:
    """The cases of a file with one JSON object a line.

    Raises:
        BadInputError: the file is missing, empty or a line cannot be read.
    """
    lines = read_text(path, "grid").splitlines()
    cases = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            data = json.loads(line)
        except json.JSONDecodeError as error:
            raise BadInputError(f"{where}: {error}.", "Each line is one JSON object.") from error
        cases.append(parse_case(data, where))
    if not cases:
        raise BadInputError(f"The grid {path!r} holds no case.")
    return cases


def verify(
    cases: Iterable[Case],
    report: Callable[[Result], None] | None = None,
    limit_s: float = 180.0,
) -> list[Result]:
    """Run cases over one pool of processes.

    Args:
        cases: what to verify, in order.
        report: called with each result when it is there.
        limit_s: seconds after which a case counts as hung.

    Returns:
        One result for each case. A case that raised or hung is a result with its error.

    Raises:
        BadInputError: a model or a plan file cannot be taken as it is.
    """
    from ds_autoplan.integrations.verification.pool import Pool

    listed = list(cases)
    prepared = [_prepare(case) for case in listed]
    largest = max((item.job["world"] for item in prepared if item.job), default=1)
    results = []
    with Pool(use_gpus=_gpus() >= largest) as pool:
        for item in prepared:
            results.append(_run(pool, item, limit_s))
            if report is not None:
                report(results[-1])
    return results


@dataclass(frozen=True)
class _Prepared:
    """A case with its plan and job, or why there is none."""

    case: Case
    plan: Plan | None
    job: dict[str, Any]
    error: str = ""


def _prepare(case: Case) -> _Prepared:
    from ds_autoplan.integrations.verification.small import small_config
    from ds_autoplan.plan import Plan

    config, name = _config(case.model)
    pinned = Plan.load(case.plan) if case.plan is not None else None
    tp = pinned.degrees.tp if pinned else case.tp
    pp = pinned.degrees.pp if pinned else case.pp
    try:
        small = small_config(config, name, tp, pp, case.config)
        plan = pinned or _plan(case, small, name)
    except BadInputError:
        raise
    except AutoplanError as error:
        return _Prepared(case, None, {}, str(error))
    world, total = plan.degrees.world_size, plan.global_batch_size
    calls = case.gradient_accumulation_steps
    if total % (world * calls):
        return _Prepared(
            case,
            plan,
            {},
            f"The plan's {total} samples a step are no multiple of {world} ranks * {calls} calls.",
        )
    job = {
        "config": small,
        "world": world,
        "accumulation": calls,
        "steps": case.steps,
        "samples": total // (world * calls),
        "seq_length": SEQ_LENGTH,
        "seed": case.seed,
    }
    return _Prepared(case, plan, job)


def _config(model: str) -> tuple[dict[str, Any], str]:
    from ds_autoplan.model.load import bundled_models, read_config

    if model in ARCHITECTURES and model not in bundled_models() and not Path(model).exists():
        return {"model_type": model}, model
    config, name = read_config(model)
    return dict(config), name


def _plan(case: Case, small: dict[str, Any], name: str) -> Plan:
    """The planner's own plan for the small model, with every degree pinned."""
    from ds_autoplan.api import plan
    from ds_autoplan.search.options import PlanOptions
    from ds_autoplan.workload import Workload

    calls = case.gradient_accumulation_steps
    micro = case.micro_batch_size or SAMPLES_PER_RANK * case.tp
    workload = Workload(
        seq_length=SEQ_LENGTH,
        global_batch_size=SAMPLES_PER_RANK * calls * case.world_size,
        precision=case.precision,
        backend="deepspeed",
        gradient_accumulation_steps=calls,
    )
    pins: dict[str, Any] = {
        "tp": case.tp,
        "pp": case.pp,
        "dp": case.dp,
        "zero_stage": case.zero_stage,
        "micro_batch_size": micro,
        "sequence_parallel": case.sequence_parallel,
        "activation_checkpointing": case.activation_checkpointing,
        "attention": case.attention,
        "mlp": case.mlp,
        "vocabulary": case.vocabulary,
    }
    if case.tp == 1:
        for key in ("attention", "mlp", "vocabulary"):
            del pins[key]
    return plan({**small}, _local_cpus(case.world_size), workload, PlanOptions(pins=pins, top_k=0))


def _local_cpus(world: int) -> Topology:
    from ds_autoplan.cluster import parse_cluster

    return parse_cluster(f"1x{world}xCPU")


def _run(pool: Any, item: _Prepared, limit_s: float) -> Result:
    from ds_autoplan.integrations.verification.pool import CaseFailed
    from ds_autoplan.integrations.verification.trial import run_trial

    case, plan = item.case, item.plan
    head = None if plan is None else plan.to_json()["plan"]
    if plan is None or item.error:
        return Result(case, head, error=item.error)
    started = time.monotonic()
    plan_file = pool.folder / f"plan_{plan.fingerprint}_{plan.global_batch_size}.json"
    plan.save(plan_file)
    try:
        found = run_trial(
            pool,
            item.job,
            str(plan_file),
            zero_stage=plan.degrees.zero_stage,
            precision=case.precision,
            disturb=case.disturb,
            limit_s=limit_s,
        )
    except CaseFailed as error:
        seconds = time.monotonic() - started
        return Result(case, head, error=str(error), details=error.details, seconds=seconds)
    return Result(
        case,
        head,
        max_loss_rel_diff=found.max_loss_rel_diff,
        max_grad_norm_rel_diff=found.max_grad_norm_rel_diff,
        max_weight_rel_diff=found.max_weight_rel_diff,
        worst_tensor=found.worst_tensor,
        loss=found.losses,
        reference_loss=found.reference_losses,
        seconds=time.monotonic() - started,
    )


def _gpus() -> int:
    """GPUs of this machine, as the driver lists them."""
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(line.startswith("GPU") for line in listed.stdout.splitlines())


def _check_integer(key: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise BadInputError(f"{key} is {value!r}.", f"It must be an integer of at least {least}.")
