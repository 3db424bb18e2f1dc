"""What all tests share: a quiet environment, and the cheapest tests first."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# One thread per process, and compiled operators inside the checkout: also where pytest is started
# without the Makefile. Set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(ROOT / ".torch_extensions"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run tests that start several processes after all others."""
    items.sort(key=lambda item: item.get_closest_marker("distributed") is not None)
