"""A plain Hugging Face Trainer script: bytes of Python's own standard library, a causal LM."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LENGTH = 24


class Bytes(torch.utils.data.Dataset):
    """Consecutive pieces of a module's source, as bytes."""

    def __init__(self, module: str, count: int) -> None:
        text = (Path(sysconfig.get_path("stdlib")) / module).read_bytes()
        assert len(text) >= count * LENGTH
        self.pieces = [text[i * LENGTH : (i + 1) * LENGTH] for i in range(count)]

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        # Lengths differ, so that ranks and calls hold different numbers of labels.
        tokens = list(self.pieces[index][: LENGTH - index % 7])
        return {"input_ids": tokens, "labels": tokens}


def collate(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Pad to the longest sample of the batch."""
    longest = max(len(sample["input_ids"]) for sample in samples)
    tokens = torch.zeros(len(samples), longest, dtype=torch.long)
    labels, mask = torch.full_like(tokens, -100), torch.zeros_like(tokens)
    for row, sample in enumerate(samples):
        length = len(sample["input_ids"])
        tokens[row, :length] = torch.tensor(sample["input_ids"])
        labels[row, :length] = torch.tensor(sample["labels"])
        mask[row, :length] = 1
    return {"input_ids": tokens, "labels": labels, "attention_mask": mask}


def train(folder: str, config: dict[str, Any], accumulation: int, **more: Any) -> dict[str, Any]:
    """Train, evaluate, save; returns the log, and the loss of the saved checkpoint opened again."""
    from transformers import AutoModelForCausalLM
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    trainer = make_trainer(folder, config, accumulation, **more)
    arguments = trainer.args
    trainer.train()
    metrics = trainer.evaluate()
    trainer.save_model(folder)
    dist.barrier()
    unset_hf_deepspeed_config()  # else ZeRO-3's JSON has the opened one cut, too
    again = AutoModelForCausalLM.from_pretrained(folder).eval()
    batch = collate([Bytes("bisect.py", 8)[i] for i in range(8)])
    with torch.no_grad():
        reopened = again(**batch).loss.item()
    dist.barrier()
    log = trainer.state.log_history
    return {
        "losses": [entry["loss"] for entry in log if "loss" in entry],
        "rates": [entry["learning_rate"] for entry in log if "learning_rate" in entry],
        "norms": [entry["grad_norm"] for entry in log if "grad_norm" in entry],
        "eval_loss": metrics["eval_loss"],
        "reopened": reopened,
        "names": sorted(again.state_dict()),
        "steps": trainer.state.global_step,
        "batch": (arguments.train_batch_size, trainer._train_batch_size),
    }


def resume(folder: str, config: dict[str, Any], accumulation: int) -> dict[str, Any]:
    """Losses of four steps with a checkpoint after two, and of a new trainer that goes on there."""
    saving = {"save_strategy": "steps", "save_steps": 2}
    found = []
    for start in (None, f"{folder}/checkpoint-2"):
        trainer = make_trainer(folder, config, accumulation, **saving)
        trainer.train(resume_from_checkpoint=start)
        log = trainer.state.log_history
        found.append([entry["loss"] for entry in log if "loss" in entry])
        dist.barrier()
    return {"whole": found[0], "resumed": found[1]}


def make_trainer(
    folder: str, config: dict[str, Any], accumulation: int, start: str | None = None, **more: Any
) -> Any:
    """The trainer of this script, with a new model, or one that is loaded from `start`.

    As in most scripts the arguments come first: a model made after them is cut where the JSON says
    ZeRO-3.
    """
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=folder,
        deepspeed=config,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=3,
        gradient_accumulation_steps=accumulation,
        max_steps=4,
        learning_rate=5e-3,
        weight_decay=0.1,
        max_grad_norm=0.7,
        warmup_steps=2,
        logging_steps=1,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
        **{"save_strategy": "no", **more},
    )
    return Trainer(
        model=make_model() if start is None else AutoModelForCausalLM.from_pretrained(start),
        args=arguments,
        train_dataset=Bytes("argparse.py", 200),
        eval_dataset=Bytes("ast.py", 21),
        data_collator=collate,
    )


def make_model() -> Any:
    """A tied llama over bytes."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama",
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=257,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    return AutoModelForCausalLM.from_config(config)
