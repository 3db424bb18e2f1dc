"""The reference: the Hugging Face model itself in one process, and the comparison with it.

Nothing of DeepSpeed, Megatron-core or the plan runs here. With a accumulation steps and W ranks,
the step minimises

    (1 / (a W)) * sum over calls and ranks of the loss that the model returns for that rank's batch

which is what data parallelism over W ranks does.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import asdict, dataclass
from typing import Any

import torch
from ds_autoplan.integrations.verification.training import (
    CLIPPING,
    Job,
    batch_of,
    build_model,
    make_optimizer,
)
from torch import Tensor

# How many runs are kept: cases of a grid that differ in the plan only share one.
KEPT_RUNS = 64


@dataclass(frozen=True)
class Run:
    """A training run: losses by call and rank, gradient norms by step, weights at the end."""

    losses: list[list[float]]
    norms: list[float]
    weights: dict[str, Tensor]


class Referee:
    """Trains references, keeps them, and compares what a plan gave."""

    def __init__(self) -> None:
        """Start with no runs."""
        self.runs: OrderedDict[str, Run] = OrderedDict()

    def __call__(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer {"train": job} or {"compare": job, "folder": checkpoint}."""
        if "train" in request:
            run = self.run(Job(**request["train"]))
            return {"losses": run.losses, "norms": run.norms}
        run = self.run(Job(**request["compare"]))
        return compare_weights(run.weights, request["folder"])

    def run(self, job: Job) -> Run:
        """The reference for a job, trained once."""
        key = json.dumps(asdict(job), sort_keys=True)
        if key not in self.runs:
            self.runs[key] = train(job)
            while len(self.runs) > KEPT_RUNS:
                self.runs.popitem(last=False)
        return self.runs[key]


def train(job: Job) -> Run:
    """Train the whole model on the union of the ranks' batches."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build_model(job).to(device)
    optimizer = make_optimizer(model)
    losses: list[list[float]] = []
    norms: list[float] = []
    for call in range(job.calls):
        losses.append([])
        for rank in range(job.world):
            batch = batch_of(job, call, rank, getattr(model.config, "pad_token_id", None))
            batch = {name: value.to(device) for name, value in batch.items()}
            loss = model(**batch, use_cache=False).loss
            (loss / (job.world * job.accumulation)).backward()
            losses[-1].append(loss.item())
        if (call + 1) % job.accumulation == 0:
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)))
            optimizer.step()
            optimizer.zero_grad()
    return Run(losses, norms, {name: value.cpu() for name, value in model.state_dict().items()})


def compare_weights(expected: dict[str, Tensor], folder: str) -> dict[str, Any]:
    """Open a checkpoint with `from_pretrained` and compare every tensor.

    Returns:
        The largest difference, relative to the largest absolute value of its tensor, and the
        tensor.
    """
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    found = model.state_dict()
    missing = sorted({*info["missing_keys"], *(set(expected) - set(found))})
    if missing or info["unexpected_keys"] or info["mismatched_keys"]:
        raise AssertionError(
            f"The saved checkpoint is not whole: missing {missing}, unexpected "
            f"{sorted(info['unexpected_keys'])}, mismatched {info['mismatched_keys']}."
        )
    worst, name = 0.0, ""
    for key, value in expected.items():
        largest = max(float(value.abs().max()), torch.finfo(torch.float32).tiny)
        difference = float((found[key].float() - value).abs().max()) / largest
        if not difference <= worst:  # so that nan counts as worst
            worst, name = difference, key
    return {"max_weight_rel_diff": worst, "tensor": name}
