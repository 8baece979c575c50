"""What is loaded before a process settles is no work for the garbage collector any more."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from penstock.runtime.gc_freeze import freeze_gc


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_the_collector_looks_only_at_what_came_later() -> None:
    loaded: list[list[object]] = [[]]
    freeze_gc()
    came_later: list[list[object]] = [[]]
    seen = {id(found) for found in gc.get_objects()}
    assert id(came_later) in seen
    assert id(loaded) not in seen
