"""Scripts with one mistake each. As a program: `failing.py --case NAME --plan FILE`."""

from __future__ import annotations

import argparse
import json
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

import ds_autoplan  # noqa: F401  (what a site does that refuses .pth files)
from tests.distributed.pool import CONFIG
from tests.distributed.scripts.loops import make_batch, make_model


def start(config: dict[str, Any], model: Any = None, optimizer: Any = None) -> Any:
    """An engine, as any script starts one."""
    model = model or make_model()
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def step(engine: Any, batch: dict[str, Any]) -> float:
    """One training step."""
    loss = engine(**batch).loss
    engine.backward(loss)
    engine.step()
    return float(loss)


def loss_outside(config: dict[str, Any]) -> None:
    """The script computes the loss from logits."""
    engine = start(config)
    logits = engine(input_ids=make_batch(0, 2)["input_ids"]).logits
    engine.backward(logits.mean())


def logits_of_a_training_call(config: dict[str, Any]) -> None:
    """The loss is the model's, but the script adds to it from the logits."""
    output = start(config)(**make_batch(0, 2))
    (output.loss + output.logits.pow(2).mean()).backward()


def loss_with_more(config: dict[str, Any]) -> None:
    """The script adds a term of its own that needs a gradient."""
    model = make_model()
    engine = start(config, model)
    loss = engine(**make_batch(0, 2)).loss
    engine.backward(loss + 1e-3 * next(model.parameters()).pow(2).sum())


def backward_of_the_tensor(config: dict[str, Any]) -> None:
    """`loss.backward()` in place of `engine.backward(loss)`."""
    start(config)(**make_batch(0, 2)).loss.backward()


def unknown_block(config: dict[str, Any]) -> None:
    """One block holds a weight that nobody knows."""
    model = make_model()
    model.model.layers[1].adapter = torch.nn.Linear(32, 32)
    start(config, model)


def batch_that_does_not_divide(config: dict[str, Any]) -> None:
    """Ten samples for four ranks of two."""
    start({**config, "train_batch_size": 10})


def stepped_optimizer(config: dict[str, Any]) -> None:
    """The optimizer has made a step before."""
    deepspeed.init_distributed()
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(**make_batch(0, 2)).loss.backward()
    optimizer.step()
    start(config, model, optimizer)


def matrix_optimizer(config: dict[str, Any]) -> None:
    """The optimizer works on whole matrices."""
    model = make_model()
    matrices = [p for p in model.model.layers.parameters() if p.dim() == 2]
    start(config, model, torch.optim.Muon(matrices, lr=1e-2))


def foreign_parameter(config: dict[str, Any]) -> None:
    """The optimizer holds a parameter that is not the model's."""
    model = make_model()
    extra = torch.nn.Parameter(torch.zeros(3))
    start(config, model, torch.optim.AdamW([*model.parameters(), extra], lr=1e-2))


def unknown_key(config: dict[str, Any]) -> None:
    """A typing error in the object."""
    start({**config, "autoplan": {"seq_lenght": 128}})


def wrong_value(config: dict[str, Any]) -> None:
    """A degree that is no number."""
    start({**config, "autoplan": {"tp": "four"}})


def rank_dependent_arguments(config: dict[str, Any]) -> None:
    """One rank passes an argument that the others don't."""
    engine = start(config)
    batch = make_batch(0, 2)
    if dist.get_rank() == 1:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    step(engine, batch)


def valid(config: dict[str, Any]) -> None:
    """Nothing is wrong here but what the config says."""
    step(start(config), make_batch(0, 2))


def own_error_on_one_rank(config: dict[str, Any]) -> None:
    """The script itself fails, on one rank."""
    engine = start(config)
    step(engine, make_batch(0, 2))
    if dist.get_rank() == 2:
        raise ValueError("my data is broken")
    step(engine, make_batch(1, 2))


def save_and_leave(config: dict[str, Any], folder: str = "") -> None:
    """Rank 0 saves alone, the others are gone by then; torch.distributed is ended by all."""
    model = make_model()
    engine = start(config, model)
    step(engine, make_batch(0, 2))
    if dist.get_rank() == 0 and folder:
        model.save_pretrained(folder)
    if config.get("destroy"):
        dist.destroy_process_group()


def main() -> None:
    """Run one case."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", required=True)
    parser.add_argument("--autoplan", type=json.loads, default=None)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--destroy", action="store_true")
    parser.add_argument("--local_rank", type=int, default=0)
    given = parser.parse_args()
    config = {**CONFIG, "autoplan": given.autoplan}
    more = {}
    if given.folder:
        more["folder"] = given.folder
    if given.destroy:
        config["destroy"] = True
    globals()[given.case](config, **more)


if __name__ == "__main__":
    main()
