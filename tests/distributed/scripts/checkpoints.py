"""Scripts that save, stop, load and go on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from tests.distributed.scripts.loops import make_batch, make_model, two_groups


def _start(config: dict[str, Any], model: Any) -> tuple[Any, Any]:
    # With the usual epsilon, Adam makes steps of full size from gradients that are rounding noise.
    optimizer = torch.optim.AdamW(two_groups(model), lr=1e-2, eps=1e-6)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    engine, _, _, scheduler = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config
    )
    return engine, scheduler


def _train(engine: Any, first: int, steps: int) -> list[float]:
    losses = []
    for call in range(first, first + steps):
        loss = engine(**make_batch(call, 2)).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def save_and_go_on(config: dict[str, Any], folder: str, **model: Any) -> dict[str, Any]:
    """Two steps, save in every way, two more steps."""
    made = make_model(**model)
    engine, scheduler = _start(config, made)
    _train(engine, 0, 2)
    engine.save_checkpoint(folder, client_state={"epoch": 7})
    if dist.get_rank() == 0 and engine.zero_optimization_stage() < 3:
        made.save_pretrained(os.path.join(folder, "by_rank_0"))
    engine.module.save_pretrained(os.path.join(folder, "by_all"))
    saved = engine.save_16bit_model(os.path.join(folder, "one_file"))
    dist.barrier()
    losses = _train(engine, 2, 2)
    rates = scheduler.get_last_lr()
    engine.destroy()
    return {"losses": losses, "rates": rates, "saved": saved}


def load_and_go_on(config: dict[str, Any], folder: str, **model: Any) -> dict[str, Any]:
    """A new job: other initial weights, the checkpoint, two steps."""
    engine, scheduler = _start(config, make_model(seed=99, **model))
    path, state = engine.load_checkpoint(folder)
    assert path is not None
    step = engine.global_steps
    losses = _train(engine, 2, 2)
    rates = scheduler.get_last_lr()
    engine.destroy()
    return {"losses": losses, "rates": rates, "epoch": state["epoch"], "step": step}


def start_from_weights(config: dict[str, Any], folder: str) -> dict[str, Any]:
    """A new job from the saved Hugging Face weights, with a new optimizer."""
    from transformers import AutoModelForCausalLM

    engine, _ = _start(config, AutoModelForCausalLM.from_pretrained(folder))
    losses = _train(engine, 2, 2)
    engine.destroy()
    return {"losses": losses}


def saved_alike(folder: str, reference: str) -> dict[str, Any]:
    """Largest difference, relative to each tensor's largest value, of every saved form."""
    from transformers import AutoModelForCausalLM

    expected = AutoModelForCausalLM.from_pretrained(os.path.join(reference, "by_all")).state_dict()
    differences: dict[str, Any] = {}
    for form in ("by_rank_0", "by_all", "one_file"):
        where = Path(folder) / form
        if not where.exists():
            continue
        if form == "one_file":
            state = torch.load(where / "pytorch_model.bin", weights_only=True)
        else:
            state = AutoModelForCausalLM.from_pretrained(where).state_dict()
        assert set(state) == set(expected), form
        differences[form] = max(
            float((state[name] - value).abs().max() / value.abs().max())
            for name, value in expected.items()
        )
    return differences


def read_everywhere(config: dict[str, Any]) -> dict[str, Any]:
    """Every rank reads the state dict of the model, as under data parallelism."""
    model = make_model()
    engine, _ = _start(config, model)
    _train(engine, 0, 1)
    dist.barrier()
    norms = {name: float(value.float().norm()) for name, value in model.state_dict().items()}
    dist.barrier()
    engine.destroy()
    return norms
