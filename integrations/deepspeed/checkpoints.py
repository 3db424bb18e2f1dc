"""DeepSpeed's checkpoints under a plan.

`save_checkpoint` writes what each rank holds, as DeepSpeed does under any model parallelism, and
beside it the plan. Such a checkpoint goes on under a plan that lays the weights out alike;
`load_checkpoint` says so where it does not, instead of mixing up shards. What leaves the job
(`save_16bit_model`, `save_pretrained`) is the whole model, which opens anywhere.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ds_autoplan.integrations.deepspeed.replica import Replica
from ds_autoplan.integrations.transformers.weights import WeightService
from torch import nn

from ds_autoplan.errors import UnsupportedError
from ds_autoplan.plan import Plan

LAYOUT_FILE = "ds_autoplan_layout.json"


def layout(plan: Plan) -> dict[str, Any]:
    """What decides where each weight lies; dp, ZeRO and micro-batches do not."""
    sharded = plan.degrees.tp > 1
    return {
        "tp": plan.degrees.tp,
        "stages": [list(bounds) for bounds in plan.stage_bounds],
        "vocabulary": plan.vocabulary if sharded else "replicate",
        "layers": [
            [layer.strategy.attention, layer.strategy.mlp] if sharded else []
            for layer in plan.layers
        ],
    }


class Checkpoints:
    """Saving and loading; a mixin of both engines."""

    replica: Replica | None
    weight_service: WeightService | None

    def module_state_dict(self, exclude_frozen_parameters: bool = False, **kwargs: Any) -> Any:
        """What this rank holds, for a checkpoint (the model itself answers with the whole)."""
        if self.weight_service is None or (self.replica is not None and self.replica.cut):
            return super().module_state_dict(  # type: ignore[misc]
                exclude_frozen_parameters=exclude_frozen_parameters, **kwargs
            )
        model = self.weight_service.model
        state = type(model).state_dict(model)
        if exclude_frozen_parameters:
            _drop_frozen(state, model)
        return state

    def save_checkpoint(
        self,
        save_dir: Any,
        tag: Any = None,
        client_state: Any = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> Any:
        """As DeepSpeed; all ranks call it."""
        if tag is None:
            tag = f"global_step{self.global_steps}"  # type: ignore[attr-defined]
        saved = super().save_checkpoint(  # type: ignore[misc]
            save_dir,
            tag=tag,
            client_state={} if client_state is None else client_state,
            save_latest=save_latest,
            exclude_frozen_parameters=exclude_frozen_parameters,
        )
        if self.replica is not None and dist.get_rank() == 0:
            file = Path(save_dir) / str(tag) / LAYOUT_FILE
            file.write_text(json.dumps(layout(self.replica.plan)))
        dist.barrier()
        return saved

    def load_checkpoint(self, load_dir: Any, tag: Any = None, **kwargs: Any) -> Any:
        """As DeepSpeed; all ranks call it.

        Raises:
            UnsupportedError: the checkpoint's weights lie otherwise than this plan's.
        """
        self._check_layout(Path(load_dir), tag)
        return super().load_checkpoint(load_dir, tag=tag, **kwargs)  # type: ignore[misc]

    def _check_layout(self, folder: Path, tag: Any) -> None:
        latest = folder / "latest"
        if tag is None and latest.is_file():
            tag = latest.read_text().strip()
        if tag is None or not (folder / str(tag)).is_dir():
            return  # nothing there: DeepSpeed says so in its own way
        file = folder / str(tag) / LAYOUT_FILE
        saved = json.loads(file.read_text()) if file.is_file() else None
        mine = None if self.replica is None else layout(self.replica.plan)
        if _whole(saved) and _whole(mine):
            return
        if saved != mine:
            raise UnsupportedError(
                f"The checkpoint {folder / str(tag)} was saved under {_words(saved)}; "
                f"this job runs under {_words(mine)}.",
                "A checkpoint with optimizer states goes on under the layout it was saved in.",
                "Pin the plan it was saved under, or start from the model's weights: "
                "save_pretrained in the first job, from_pretrained in this one.",
            )

    def save_16bit_model(
        self,
        save_dir: Any,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the whole model's weights to one file on rank 0; all ranks call it."""
        if self.weight_service is None:
            return super().save_16bit_model(  # type: ignore[misc, no-any-return]
                save_dir, save_filename, exclude_frozen_parameters
            )
        state = self._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)
        if state is not None:
            Path(save_dir).mkdir(parents=True, exist_ok=True)
            torch.save(state, Path(save_dir) / save_filename)
        dist.barrier()
        return True

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Whether :meth:`save_16bit_model` saves: under a plan always."""
        if self.weight_service is None:
            return bool(super().zero_gather_16bit_weights_on_model_save())  # type: ignore[misc]
        return True

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> Any:
        """The whole weights on rank 0, None elsewhere (what accelerate asks for under ZeRO 3)."""
        if self.weight_service is None:
            return super()._zero3_consolidated_16bit_state_dict(  # type: ignore[misc]
                exclude_frozen_parameters
            )
        model = self.weight_service.model
        state = model.state_dict()
        if dist.get_rank() != 0:
            return None
        whole = OrderedDict(state)
        if exclude_frozen_parameters:
            _drop_frozen(whole, model)
        return whole


def _whole(saved: dict[str, Any] | None) -> bool:
    """Whether every rank holds the whole model."""
    return saved is None or (saved["tp"] == 1 and len(saved["stages"]) == 1)


def _words(saved: dict[str, Any] | None) -> str:
    if saved is None:
        return "plain data parallelism"
    split = sum(1 for layer in saved["layers"] if "heads" in layer or "shard" in layer)
    stages = ", ".join(f"{first}-{last - 1}" for first, last in saved["stages"])
    return (
        f"tp {saved['tp']} x pp {len(saved['stages'])} (stages of layers {stages}; {split} layers "
        f"sharded; vocabulary {saved['vocabulary']})"
    )


def _drop_frozen(state: Any, model: nn.Module) -> None:
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad and name in state:
            del state[name]
