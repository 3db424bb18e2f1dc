"""Folding a real module tree: repeated substructures by shape, whatever their names.

Works on any object that looks like a torch module (`named_children`, `parameters(recurse=False)`,
`__class__`), so nothing is imported here. A module's fingerprint is made of its kind (for leaves
the class name), the shapes of its own parameters in order, and its children's fingerprints in
order. Attribute names and the class names of containers do not count: a renamed copy folds with the
original.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol


class ModuleLike(Protocol):
    """What folding asks of a module."""

    def named_children(self) -> Iterable[tuple[str, Any]]:
        """Direct children by attribute name."""

    def parameters(self, recurse: bool = True) -> Iterable[Any]:
        """Parameters; only the module's own with `recurse=False`."""


@dataclass(frozen=True)
class FoldReport:
    """Counts of a folded tree.

    Attributes:
        modules: modules in the tree, the root included.
        operators: modules that hold parameters themselves.
        distinct_modules: modules left after folding equal ones.
        stack: dotted name of the list with the most equal blocks ("" if none repeats).
        block_classes: for each block of that list, the index of its class.
        largest_class: how many blocks the most frequent class has.
    """

    modules: int
    operators: int
    distinct_modules: int
    stack: str
    block_classes: tuple[int, ...]
    largest_class: int

    @property
    def distinct_blocks(self) -> int:
        """Block classes in the stack."""
        return len(set(self.block_classes))


def fingerprint(module: ModuleLike, memo: dict[int, str] | None = None) -> str:
    """Hash of a module's structure (16 hex digits)."""
    memo = {} if memo is None else memo
    key = id(module)
    if key not in memo:
        children = [fingerprint(child, memo) for _, child in module.named_children()]
        shapes = [tuple(parameter.shape) for parameter in module.parameters(recurse=False)]
        kind = type(module).__name__ if not children else "container"
        text = repr((kind, shapes, children))
        memo[key] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return memo[key]


def fold_modules(root: ModuleLike) -> FoldReport:
    """Fold a module tree and find its stack of blocks.

    The stack is the container whose direct children hold the most parameters in repeated
    structures.
    """
    memo: dict[int, str] = {}
    fingerprint(root, memo)
    modules = operators = 0
    distinct: set[str] = set()
    best: tuple[int, str, list[str]] = (0, "", [])
    queue: list[tuple[str, Any]] = [("", root)]
    while queue:
        name, module = queue.pop()
        modules += 1
        distinct.add(memo[id(module)])
        operators += any(True for _ in module.parameters(recurse=False))
        children = list(module.named_children())
        prints = [memo[id(child)] for _, child in children]
        repeated = {item for item, count in Counter(prints).items() if count > 1}
        weight = sum(
            _size(child)
            for (_, child), item in zip(children, prints, strict=True)
            if item in repeated
        )
        if weight > best[0]:
            best = (weight, name, prints)
        queue += [(f"{name}.{key}" if name else key, child) for key, child in children]
    order: dict[str, int] = {}
    classes = tuple(order.setdefault(item, len(order)) for item in best[2])
    largest = max(Counter(classes).values(), default=0)
    return FoldReport(modules, operators, len(distinct), best[1], classes, largest)


def _size(module: Any) -> int:
    return sum(int(parameter.numel()) for parameter in module.parameters())
