"""What all tests share: a quiet environment, and the cheapest tests first."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.pool import Pool

ROOT = Path(__file__).resolve().parent.parent

# One thread per process, and compiled operators inside the checkout: also where pytest is started
# without the Makefile. Set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(ROOT / ".torch_extensions"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run tests that start several processes after all others."""
    items.sort(key=lambda item: item.get_closest_marker("distributed") is not None)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four ranks on gloo, started once for all tests that send functions to them."""
    ranks = Pool(4)
    yield ranks
    ranks.close()
