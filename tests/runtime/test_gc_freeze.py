"""What is loaded before a process settles is no work for the garbage collector any more."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from penstock.runtime.process_memory import freeze_gc, make_collections_rare


@pytest.fixture(autouse=True)
def default_thresholds() -> Iterator[None]:
    """What is frozen stays so: with all that this process has loaded, collections in later tests would take 0.3 s."""
    thresholds = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*thresholds)


def test_collector_scans_only_objects_made_after_the_freeze() -> None:
    loaded: list[list[object]] = [[]]
    freeze_gc()
    came_later: list[list[object]] = [[]]
    seen = {id(found) for found in gc.get_objects()}
    assert id(came_later) in seen
    assert id(loaded) not in seen


def num_full_collections() -> int:
    return int(gc.get_stats()[2]["collections"])


def test_many_live_objects_cause_no_full_collection_where_those_are_rare() -> None:
    freeze_gc()
    # The collector waits until a quarter of what survived the last full collection is new.
    gc.collect()
    before = num_full_collections()
    as_by_default: list[list[object]] = [[] for _ in range(200_000)]
    assert num_full_collections() > before
    del as_by_default
    freeze_gc()
    make_collections_rare()
    before = num_full_collections()
    live: list[list[object]] = [[] for _ in range(1_000_000)]
    assert num_full_collections() == before
    del live


def test_circular_garbage_is_still_collected_in_time() -> None:
    freeze_gc()
    make_collections_rare()
    before, kept = num_full_collections(), list[list[object]]()
    while num_full_collections() == before:
        kept += [[] for _ in range(10_000)]
        assert len(kept) < 3_000_000
