"""A script whose model drops activations; every rank seeds otherwise, as many scripts do."""

from __future__ import annotations

import hashlib
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from tests.distributed.scripts.loops import make_batch, make_model

GPT2 = {
    "model_type": "gpt2",
    "n_embd": 32,
    "n_head": 4,
    "n_layer": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "resid_pdrop": 0.2,
    "embd_pdrop": 0.2,
    "attn_pdrop": 0.2,
    "attn_implementation": "eager",
}


class Masks:
    """Records the mask of every dropout: its shape and a hash."""

    def __init__(self) -> None:
        self.seen: list[tuple[tuple[int, ...], str]] = []
        self.original = torch.nn.functional.dropout

    def __enter__(self) -> Masks:
        torch.nn.functional.dropout = self
        return self

    def __exit__(self, *_: Any) -> None:
        torch.nn.functional.dropout = self.original

    def __call__(self, input: Any, p: float = 0.5, training: bool = True, *_: Any) -> Any:
        output = self.original(input, p, training)
        if training and p > 0:
            kept = (output != 0) | (input == 0)
            digest = hashlib.sha256(kept.contiguous().numpy().tobytes()).hexdigest()
            self.seen.append((tuple(input.shape), digest))
        return output


def train(config: dict[str, Any], steps: int = 3) -> dict[str, Any]:
    """Train, and return losses, the masks of the first call, and what weights this rank holds."""
    model = make_model(**GPT2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)
    torch.manual_seed(1000 + dist.get_rank())
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    before = torch.get_rng_state()
    losses = []
    with Masks() as masks:
        for call in range(steps):
            loss = engine(**make_batch(call, 2)).loss
            if call == 0:
                first = list(masks.seen)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    weights = {
        name: hashlib.sha256(value.detach().numpy().tobytes()).hexdigest()
        for name, value in type(model).state_dict(model).items()
        if isinstance(value, torch.Tensor)
        and value.dim() == 1
        and not getattr(model.get_parameter(name), "model_parallel", False)
    }
    untouched = bool(torch.equal(before, torch.get_rng_state()))
    engine.destroy()
    return {"losses": losses, "masks": first, "weights": weights, "untouched": untouched}
