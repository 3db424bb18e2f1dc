"""What the script reads off an engine: plain data parallelism over all ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.dataloader import DeepSpeedDataLoader
from ds_autoplan.integrations.deepspeed.batch import BatchSettings
from ds_autoplan.integrations.transformers.weights import WeightService


class ScriptView:
    """Batch settings and data loaders as the script knows them; a mixin of both engines."""

    script_batch: BatchSettings
    weight_service: WeightService | None = None

    def note_step(self) -> None:
        """Tell the rank's weight service that the weights have changed."""
        if self.weight_service is not None:
            self.weight_service.note_step()

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """As DeepSpeed's; it changes the weights as a step does."""
        loaded = super().load_checkpoint(*args, **kwargs)  # type: ignore[misc]
        self.note_step()
        return loaded

    def destroy(self) -> None:
        """End the engine, and the thread that serves this rank's weights; all ranks call it."""
        if self.weight_service is not None:
            self.weight_service.close()
        super().destroy()  # type: ignore[misc]

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples that one rank feeds per call."""
        if hasattr(self, "script_batch"):
            return self.script_batch.micro
        return super().train_micro_batch_size_per_gpu()  # type: ignore[misc]

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Any = None,
        num_local_io_workers: int | None = None,
    ) -> DeepSpeedDataLoader:
        """A loader over this rank's share of `dataset`, sampled over all ranks."""
        world, rank = dist.get_world_size(), dist.get_rank()
        if data_sampler is None and route != "train":
            data_sampler = torch.utils.data.DistributedSampler(
                dataset, num_replicas=world, rank=rank, shuffle=False
            )
        return DeepSpeedDataLoader(
            dataset=dataset,
            batch_size=batch_size or self.train_micro_batch_size_per_gpu(),
            pin_memory=pin_memory and torch.cuda.is_available(),
            collate_fn=collate_fn or self.collate_fn,  # type: ignore[attr-defined]
            local_rank=self.local_rank,  # type: ignore[attr-defined]
            tput_timer=self.tput_timer if route == "train" else None,  # type: ignore[attr-defined]
            num_local_io_workers=num_local_io_workers,
            data_sampler=data_sampler,
            data_parallel_world_size=world,
            data_parallel_rank=rank,
            dataloader_drop_last=self.dataloader_drop_last(),  # type: ignore[attr-defined]
            deepspeed_dataloader_config={},
        )
