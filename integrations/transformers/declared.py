"""What a Hugging Face model declares of itself: `base_model_tp_plan` and `base_model_pp_plan`.

The first source of styles. A declared style decides where the tables of layouts.py know nothing,
and contradicting one refuses the model: one of the two would shard it wrongly.
"""

from __future__ import annotations

from typing import Any

from torch import nn

COLUMN_STYLES = ("colwise", "colwise_gather_output", "packed_colwise")
ROW_STYLES = ("rowwise", "rowwise_split_input")


def declared_styles(model: nn.Module, blocks_name: str) -> dict[str, str]:
    """Declared styles of a block's modules, by name: "column", "row" or another word.

    Args:
        model: the model.
        blocks_name: dotted name of its list of blocks.
    """
    plan: dict[str, Any] = {}
    config = model.config.get_text_config()
    for source in (config, getattr(model, "base_model", None), model):
        for attribute in ("base_model_tp_plan", "_tp_plan"):
            declared = getattr(source, attribute, None)
            plan.update(declared if isinstance(declared, dict) else {})
    last = blocks_name.rpartition(".")[2]
    styles: dict[str, str] = {}
    for name, style in plan.items():
        _, found, within = f".{name}".partition(f".{last}.*.")
        if found and isinstance(style, str):
            kind = "column" if style in COLUMN_STYLES else "row" if style in ROW_STYLES else style
            styles[within] = kind
    return styles


def declared_stack(model: nn.Module) -> str:
    """Dotted name of the list of blocks that the pipeline plan names; "" where there is none."""
    config = getattr(model, "config", None)
    plan = getattr(config, "base_model_pp_plan", None) or {}
    base = getattr(model, "base_model", model)
    names = {id(module): name for name, module in model.named_modules()}
    for name in plan:
        module = getattr(base, name, None)
        if isinstance(module, nn.ModuleList) and id(module) in names:
            return names[id(module)]
    return ""


def declared_mlp(styles: dict[str, str], parent: str) -> tuple[tuple[str, ...], str] | None:
    """(column-parallel layers, row-parallel layer) declared right under `parent`, if complete."""
    prefix = f"{parent}." if parent else ""
    inside = {
        name[len(prefix) :]: kind
        for name, kind in styles.items()
        if name.startswith(prefix) and "." not in name[len(prefix) :]
    }
    columns = tuple(name for name, kind in inside.items() if kind == "column")
    rows = [name for name, kind in inside.items() if kind == "row"]
    return (columns, rows[0]) if columns and len(rows) == 1 else None


def contradiction(styles: dict[str, str], columns: set[str], rows: set[str]) -> str:
    """Why the declared styles and what was recognised cannot both be right; "" if they agree.

    Args:
        styles: see :func:`declared_styles`.
        columns: modules recognised as column-parallel, by name within the block.
        rows: modules recognised as row-parallel.
    """
    for name, kind in styles.items():
        recognised = "column" if name in columns else "row" if name in rows else ""
        if kind in ("column", "row") and recognised and kind != recognised:
            return f"{name} is declared {kind}wise by the model, but recognised as {recognised}wise"
    return ""
