"""A model that was built or loaded under ZeRO-3 is made whole again, before it is taken apart.

Where the JSON says stage 3, Transformers builds and loads a model inside `deepspeed.zero.Init` (as
soon as `TrainingArguments` exist): every parameter is cut over all ranks when it is made. A plan
decides itself what is cut over which ranks, so the parameters are gathered here and lose what
DeepSpeed attached to them. They stay the same objects. Every process holds the whole model then,
in its own memory and not on a GPU.
"""

from __future__ import annotations

import torch
from torch import nn

# What DeepSpeed's `Init` attaches to a parameter beside names that begin with "ds_".
ATTACHED = (
    "aligned_size",
    "all_gather",
    "all_gather_coalesced",
    "convert_to_zero_parameters",
    "is_external_param",
    "item",
    "nvme_swapper",
    "padding_size",
    "partition",
    "partition_gradients",
    "partition_numel",
    "reduce_gradients_at_owner",
)


def make_whole(model: nn.Module) -> bool:
    """Undo `deepspeed.zero.Init`; a collective call. Whether there was anything to undo."""
    cut = [parameter for parameter in model.parameters() if hasattr(parameter, "ds_id")]
    for parameter in cut:
        parameter.all_gather(param_list=[parameter])
        whole = parameter.data.to("cpu", copy=True)
        for name in list(vars(parameter)):
            if name.startswith("ds_") or name in ATTACHED:
                delattr(parameter, name)
        parameter.data = whole
    if cut:
        forget_linear()
    return bool(cut)


def forget_linear() -> None:
    """Put torch's linear back, which ZeRO-3 replaces for the rest of the process."""
    from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses

    plain = getattr(InsertPostInitMethodToModuleSubClasses, "linear_bk", None)
    if plain is not None:
        torch.nn.functional.linear = plain
