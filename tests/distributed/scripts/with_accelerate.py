"""A plain accelerate script: its own loop, `accumulate`, clipping, gathered metrics."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from tests.distributed.scripts.trainer import Bytes, collate, make_model


def train(folder: str, config: dict[str, Any], accumulation: int) -> dict[str, Any]:
    """Train, evaluate, save; returns losses, norms, and the loss of the saved checkpoint."""
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin
    from transformers import AutoModelForCausalLM

    plugin = DeepSpeedPlugin(hf_ds_config=config)
    accelerator = Accelerator(
        deepspeed_plugin=plugin, cpu=True, gradient_accumulation_steps=accumulation
    )
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    loader = torch.utils.data.DataLoader(
        Bytes("argparse.py", 8 * 3 * accumulation), batch_size=2, collate_fn=collate
    )
    evaluation = torch.utils.data.DataLoader(Bytes("ast.py", 21), batch_size=3, collate_fn=collate)
    model, optimizer, loader, evaluation, scheduler = accelerator.prepare(
        model, optimizer, loader, evaluation, scheduler
    )
    losses, rates = [], []
    model.train()
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.7)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        rates.append(scheduler.get_last_lr()[0])
    model.eval()
    evaluated = []
    for batch in evaluation:
        with torch.no_grad():
            loss = model(**batch).loss
        evaluated += accelerator.gather_for_metrics(loss.repeat(3)).tolist()
    whole = accelerator.get_state_dict(model)
    accelerator.unwrap_model(model).save_pretrained(
        folder, is_main_process=accelerator.is_main_process, state_dict=whole
    )
    accelerator.save_state(os.path.join(folder, "state"))
    accelerator.wait_for_everyone()
    again = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        reopened = again(**collate([Bytes("bisect.py", 8)[i] for i in range(8)])).loss.item()
    dist.barrier()
    return {"losses": losses, "rates": rates, "evaluated": evaluated, "reopened": reopened}
