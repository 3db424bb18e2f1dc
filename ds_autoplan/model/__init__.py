"""Reading models: from a Hugging Face config to a block graph, without torch."""

from ds_autoplan.model.graph import (
    Attention,
    BlockClass,
    BlockGraph,
    Mlp,
    Operator,
    SkipEdge,
)
from ds_autoplan.model.load import bundled_models, load_graph, supported_model_types

__all__ = [
    "Attention",
    "BlockClass",
    "BlockGraph",
    "Mlp",
    "Operator",
    "SkipEdge",
    "bundled_models",
    "load_graph",
    "supported_model_types",
]
