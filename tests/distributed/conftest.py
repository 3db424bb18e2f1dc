"""The pool of processes that all distributed tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four ranks on gloo."""
    ranks = Pool(4)
    yield ranks
    ranks.close()
