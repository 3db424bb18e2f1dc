"""What both sides of a comparison share: model, data, optimizer. Torch and transformers only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

IGNORED = -100
LEARNING_RATE, WEIGHT_DECAY, CLIPPING = 1e-2, 0.1, 0.5
# As large as the gradients of single weights here, for two reasons. An update of Adam with a small
# eps does not depend on the scale of a weight's gradient, so a gradient that is summed twice over
# tp would not show in the weights. And the bias of the keys has a gradient of zero in exact
# arithmetic (a constant added to all scores of a row cancels in the softmax); what is left is
# rounding noise, which a small eps would turn into steps of the full learning rate in random
# directions.
EPS = 1e-3
PERTURBATION = 0.02


@dataclass(frozen=True)
class Job:
    """One training run.

    `config` is the small model's config; each of `world` ranks feeds `samples` sequences of
    `seq_length` tokens in each of `accumulation` calls of each of `steps` steps.
    """

    config: dict[str, Any]
    world: int
    accumulation: int
    steps: int
    samples: int
    seq_length: int
    seed: int = 0

    @property
    def calls(self) -> int:
        """Calls of the model in the whole run."""
        return self.steps * self.accumulation


def build_model(job: Job) -> nn.Module:
    """The model in training mode without dropout, its weights random and all of them perturbed.

    Hugging Face starts biases at zero and norms at one, which hides wrong biases and wrong norms.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    values = dict(job.config)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    for name, value in config.to_dict().items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
        if name in ("pad_token_id", "bos_token_id", "eos_token_id") and isinstance(value, int):
            setattr(config, name, value % config.vocab_size)
    torch.manual_seed(job.seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(job.seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += PERTURBATION * torch.randn(parameter.shape, generator=generator)
    return model.train()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW with two parameter groups: weight decay on matrices only."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}]
    if others:
        groups.append({"params": others, "weight_decay": 0.0})
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, eps=EPS)


def batch_of(job: Job, call: int, rank: int, pad_token_id: int | None) -> dict[str, Tensor]:
    """What one rank feeds in one call: padded at the end, labels left out unevenly over ranks.

    The padding token also stands inside the text, where it is a word like any other.
    """
    generator = torch.Generator().manual_seed(job.seed + 7919 * call + rank)
    shape = (job.samples, job.seq_length)
    vocabulary = job.config["vocab_size"]
    padding = 0 if pad_token_id is None else pad_token_id % vocabulary
    ids = torch.randint(vocabulary, shape, generator=generator)
    ids[:, 1] = padding
    mask = torch.ones(shape, dtype=torch.long)
    missing = (3 * rank + call) % (job.seq_length // 2)
    if missing:
        mask[-1, -missing:] = 0
    ids = ids.masked_fill(mask == 0, padding)
    labels = ids.masked_fill(mask == 0, IGNORED)
    labels[:, : (2 * rank + call) % 5] = IGNORED
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}
