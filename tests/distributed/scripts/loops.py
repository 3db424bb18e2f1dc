"""Training scripts as users write them: plain DeepSpeed, data parallel over all ranks.

Nothing here knows of plans; whether one runs is decided by the config. Each function returns what
its script
printed: losses of this rank, and whatever else it looked at.
"""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as functional
from torch import Tensor

VOCABULARY, LENGTH = 101, 12


def make_model(seed: int = 0, **changes: Any) -> Any:
    """A llama with four layers and grouped kv heads; every rank makes the same."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 64,
    }
    model_type = changes.pop("model_type", "llama")
    implementation = changes.pop("attn_implementation", None)
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **{**sizes, **changes})
    return AutoModelForCausalLM.from_config(config, attn_implementation=implementation)


def make_batch(call: int, samples: int, length: int = LENGTH) -> dict[str, Tensor]:
    """This rank's batch of one call; the number of labels that are -100 differs between ranks."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(1000 * call + rank)
    tokens = torch.randint(0, VOCABULARY, (samples, length), generator=generator)
    labels = tokens.clone()
    labels[:, : 1 + 2 * rank] = -100
    return {"input_ids": tokens, "labels": labels}


def two_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Matrices decay, vectors do not."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0, "lr": 3e-3},
    ]


def settings(engine: Any) -> tuple[int, int, int]:
    """The batch arithmetic that a script reads off the engine."""
    return (
        engine.train_batch_size(),
        engine.train_micro_batch_size_per_gpu(),
        engine.gradient_accumulation_steps(),
    )


def norm(engine: Any) -> float:
    """The gradient norm of the last step; Adam and clipping hide a wrong scale of gradients."""
    return float(engine.get_global_grad_norm() or 0.0)


def client_optimizer(config: dict[str, Any], steps: int = 3) -> dict[str, Any]:
    """AdamW with two parameter groups and a scheduler, both made by the script."""
    model = make_model()
    optimizer = torch.optim.AdamW(two_groups(model), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    engine, optimizer, _, scheduler = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config
    )
    losses, norms, rates = [], [], []
    for call in range(steps * engine.gradient_accumulation_steps()):
        loss = engine(**make_batch(call, engine.train_micro_batch_size_per_gpu())).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(norm(engine))
        rates.append([group["lr"] for group in optimizer.param_groups])
    return {
        "losses": losses,
        "norms": norms,
        "rates": rates,
        "last_rates": scheduler.get_last_lr(),
        "settings": settings(engine),
        "steps": engine.global_steps,
    }


def json_optimizer(config: dict[str, Any], steps: int = 3) -> dict[str, Any]:
    """Optimizer and scheduler from the JSON; `from deepspeed import initialize`."""
    from deepspeed import initialize

    model = make_model()
    config = {
        **config,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0.0, "warmup_max_lr": 1e-2, "warmup_num_steps": 4},
        },
    }
    engine, _, _, _ = initialize(model=model, model_parameters=model.parameters(), config=config)
    losses, norms, rates = [], [], []
    for call in range(steps * engine.gradient_accumulation_steps()):
        loss = engine(**make_batch(call, engine.train_micro_batch_size_per_gpu())).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(norm(engine))
        rates.append(engine.get_lr())
    return {"losses": losses, "norms": norms, "rates": rates, "settings": settings(engine)}


def loss_from_logits(config: dict[str, Any], steps: int = 3) -> dict[str, Any]:
    """The script computes its loss itself, with label smoothing."""
    model = make_model()
    optimizer = torch.optim.AdamW(two_groups(model), lr=1e-2)
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    losses, norms, shapes = [], [], []
    for call in range(steps * engine.gradient_accumulation_steps()):
        batch = make_batch(call, engine.train_micro_batch_size_per_gpu())
        logits = engine(input_ids=batch["input_ids"]).logits
        loss = functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), label_smoothing=0.1
        )
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(norm(engine))
        shapes.append(tuple(logits.shape))
    return {"losses": losses, "norms": norms, "shapes": shapes}


class Lines(torch.utils.data.Dataset):
    """Samples of different length, numbered."""

    def __len__(self) -> int:
        return 80

    def __getitem__(self, index: int) -> list[int]:
        generator = torch.Generator().manual_seed(index)
        length = 6 + index % 5
        return torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()


def pad(lines: list[list[int]]) -> dict[str, Tensor]:
    """Pad to the longest of this batch."""
    longest = max(len(line) for line in lines)
    tokens = torch.zeros(len(lines), longest, dtype=torch.long)
    labels, mask = torch.full_like(tokens, -100), torch.zeros_like(tokens)
    for row, line in enumerate(lines):
        tokens[row, : len(line)] = torch.tensor(line)
        labels[row, : len(line)] = torch.tensor(line)
        mask[row, : len(line)] = 1
    return {"input_ids": tokens, "labels": labels, "attention_mask": mask}


def given_training_data(config: dict[str, Any]) -> dict[str, Any]:
    """`training_data=` and `collate_fn=`; DeepSpeed makes the loader. One epoch."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, _, loader, _ = deepspeed.initialize(
        model=model, optimizer=optimizer, training_data=Lines(), collate_fn=pad, config=config
    )
    losses, norms, seen = [], [], []
    for batch in loader:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(norm(engine))
        seen.append(batch["input_ids"].tolist())
    return {"losses": losses, "norms": norms, "seen": seen, "length": len(loader)}


def evaluating(config: dict[str, Any], steps: int = 2) -> dict[str, Any]:
    """Evaluate between training steps, under `engine.eval()` and `torch.no_grad()`."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    losses, evaluated, modes = [], [], []
    for step in range(steps):
        for call in range(engine.gradient_accumulation_steps()):
            engine.train()
            loss = engine(**make_batch(10 * step + call, 2)).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engine.eval()
        with torch.no_grad():
            for call, (samples, length) in enumerate([(2, LENGTH), (3, LENGTH - 3)]):
                batch = make_batch(500 + call, samples, length)
                evaluated.append(engine(**batch).loss.item())
        modes.append(model.training)
        # Evaluation that forgot no_grad, and training in evaluation mode.
        evaluated.append(engine(**make_batch(600 + step, 2)).loss.item())
        for call in range(engine.gradient_accumulation_steps()):
            loss = engine(**make_batch(700 + 10 * step + call, 2)).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return {"losses": losses, "evaluated": evaluated, "modes": modes}


def uneven(config: dict[str, Any]) -> dict[str, Any]:
    """Lengths differ between ranks and steps; the last batch is short."""
    model = make_model()
    optimizer = torch.optim.AdamW(two_groups(model), lr=1e-2)
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    rank = dist.get_rank()
    losses, norms = [], []
    calls = 3 * engine.gradient_accumulation_steps()
    for call in range(calls):
        samples = 1 if call == calls - 1 else engine.train_micro_batch_size_per_gpu()
        batch = make_batch(call, samples, LENGTH + (3 * rank + 2 * call) % 7)
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(norm(engine))
    return {"losses": losses, "norms": norms}


def weighted(config: dict[str, Any], steps: int = 3) -> dict[str, Any]:
    """The weight of a loss differs between ranks and calls; some losses are only looked at."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    rank = dist.get_rank()
    losses, norms, returned = [], [], []
    for call in range(steps * engine.gradient_accumulation_steps()):
        loss = engine(**make_batch(call, 2)).loss
        returned.append(float(engine.backward(loss * (1.0, 0.25, 3.0)[call % 3] * (1 + rank))))
        engine.step()
        losses.append(loss.item())
        norms.append(norm(engine))
        if call % 2 == 0:
            losses.append(engine(**make_batch(100 + call, 2)).loss.item())
    return {"losses": losses, "norms": norms, "returned": returned}
