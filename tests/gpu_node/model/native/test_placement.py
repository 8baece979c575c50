"""Weights and KV heads by NUMA node, on a machine with two nodes that a folder describes. It has never run on one."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes.runners.thread_ranks import ranks_as_threads
from fixtures.random_families import make_family_model
from numpy.typing import NDArray

from penstock.gpu_node.engine.engine import Engine
from penstock.gpu_node.model.native import load, placement
from penstock.gpu_node.model.native.packing import packed_bytes
from penstock.gpu_node.model.native.placement import NumaPlacement
from penstock.kernels.cpu.structs import Format

PROMPTS = ["the gate opens", "water flows through the turbine and " * 12, "a"]


@pytest.fixture
def two_nodes(tmp_path: Path) -> Path:
    """Nodes with the CPUs 0, 2, 4 and 1, 3, 5."""
    for node, cpus in enumerate(("0,2,4", "1,3,5")):
        (tmp_path / "node" / f"node{node}").mkdir(parents=True)
        (tmp_path / "node" / f"node{node}" / "cpulist").write_text(cpus)
    return tmp_path


def test_threads_of_a_node_are_side_by_side(two_nodes: Path, tmp_path: Path) -> None:
    assert NumaPlacement.of([0, 1, 2, 3], two_nodes) == NumaPlacement((0, 2, 1, 3), (0, 0, 1, 1))
    assert NumaPlacement.of([3, 1], two_nodes) == NumaPlacement((3, 1), (0, 0)), "one node: as they were"
    assert not NumaPlacement.of([], two_nodes).is_spread
    assert NumaPlacement.of([1, 0], tmp_path / "none") == NumaPlacement((1, 0), (0, 0))


def test_each_node_has_the_items_that_its_threads_compute() -> None:
    uneven = NumaPlacement((0, 2, 4, 1), (0, 0, 0, 1))
    assert list(uneven.parts(10)) == [((0, 2, 4), range(7)), ((1,), range(7, 10))]
    assert list(uneven.parts(1)) == [((0, 2, 4), range(0)), ((1,), range(1))]


def test_the_panels_of_a_node_are_copied_by_a_thread_on_its_cores() -> None:
    calls: list[tuple[Sequence[int], int]] = []

    def copy(cpus: Sequence[int], target: NDArray[np.uint8], source: NDArray[np.uint8]) -> None:
        calls.append((cpus, len(source)))
        np.copyto(target, source)

    runs, columns = [(Format.BF16, 64), (Format.INT8_GROUP, 96)], 64
    packed = np.arange(packed_bytes(runs, columns)).astype(np.uint8)
    placed = NumaPlacement((0, 2, 1, 3), (0, 0, 1, 1)).placed(runs, columns, packed, copy=copy)
    assert (placed == packed).all() and not np.shares_memory(placed, packed)
    # Two of five panels, both of bfloat16, and the three of int8.
    bf16, int8 = 32 * 2 * 64, 32 * 2 * 34
    assert sorted(calls) == [((0, 2), 2 * bf16), ((1, 3), 3 * int8)]
    assert NumaPlacement((0, 2), (0, 0)).placed(runs, columns, packed, copy=copy) is packed
    assert len(calls) == 2


def test_a_rank_copies_only_its_panels() -> None:
    calls: list[tuple[Sequence[int], int]] = []

    def copy(cpus: Sequence[int], target: NDArray[np.uint8], source: NDArray[np.uint8]) -> None:
        calls.append((cpus, len(source)))
        np.copyto(target, source)

    runs, columns, size = [(Format.BF16, 192)], 64, 32 * 2 * 64
    packed = np.ones(packed_bytes(runs, columns), np.uint8)
    rank = NumaPlacement((0, 2, 1, 3), (0, 0, 1, 1)).part(range(2, 4))
    assert rank == NumaPlacement((1, 3), (1, 1), is_part=True)
    placed = rank.placed(runs, columns, packed, [1, 2, 4], copy)
    assert [panel.any() for panel in placed.reshape(6, size)] == [False, True, True, False, True, False]
    assert sorted(calls) == [((1, 3), size), ((1, 3), 2 * size)]
    on_one_node = NumaPlacement((0, 2), (0, 0)).part(range(1, 2))
    assert on_one_node.placed(runs, columns, packed, [1], copy) is packed
    assert NumaPlacement((), ()).part(range(2)) == NumaPlacement((), ())


def test_a_copy_stays_on_its_cores_and_ends_without_them() -> None:
    before = os.sched_getaffinity(0)
    try:
        placement.copy_on([min(before)], np.zeros(3, np.uint8), np.ones(3, np.uint8))
        assert os.sched_getaffinity(0) == {min(before)}
        target = np.zeros(3, np.uint8)
        # A container may have fewer CPUs than the folder says.
        placement.copy_on([1023], target, np.ones(3, np.uint8))
        assert target.all()
    finally:
        os.sched_setaffinity(0, before)


def outputs(folder: Path, **options: Any) -> list[tuple[int, ...]]:
    engine = Engine(str(folder), runner="native", dtype="bfloat16", num_kv_blocks=64, num_threads=2, **options)
    params: dict[str, Any] = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
    from penstock.contract.job import SamplingParams

    found = engine.generate(PROMPTS, SamplingParams(**params))
    return [choice.token_ids for generation in found for choice in generation.choices]


@pytest.fixture
def on_two_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Sequence[int], int]]]:
    """The two threads of a model are on two nodes; the CPUs and the bytes of each copy are recorded."""
    calls: list[tuple[Sequence[int], int]] = []
    copied = placement.copy_on

    def copy(cpus: Sequence[int], target: NDArray[np.uint8], source: NDArray[np.uint8]) -> None:
        calls.append((cpus, len(source)))
        copied(cpus, target, source)

    cores = sorted(os.sched_getaffinity(0))[:2]
    monkeypatch.setattr(load, "cores_to_stay_on", lambda _: cores)
    monkeypatch.setattr(NumaPlacement, "of", classmethod(lambda cls, given: cls(tuple(given), (0, 1))))
    monkeypatch.setattr(NumaPlacement.placed, "__defaults__", (None, copy))
    yield calls


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core")
@pytest.mark.parametrize("weight_cache", [False, True])
def test_tokens_are_those_of_one_node(
    tmp_path: Path, weight_cache: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", os.environ["PENSTOCK_CACHE"])
    folder = make_family_model(tmp_path, "llama", "bfloat16", num_hidden_layers=3)
    first = outputs(folder, weight_cache=weight_cache)
    calls: list[tuple[Sequence[int], int]] = request.getfixturevalue("on_two_nodes")
    assert outputs(folder, weight_cache=weight_cache) == first
    cores = sorted(os.sched_getaffinity(0))[:2]
    # The matrices of a file are copied; those that this process packs are written by the threads that compute them.
    assert {cpus[0] for cpus, _ in calls} == (set(cores) if weight_cache else set())


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core")
@pytest.mark.parametrize("family", ["llama", "qwen3 moe"])
def test_each_rank_has_its_own_weights_near_its_core(
    tmp_path: Path, family: str, request: pytest.FixtureRequest
) -> None:
    folder = make_family_model(tmp_path, family, "bfloat16")
    first = outputs(folder)
    calls: list[tuple[Sequence[int], int]] = request.getfixturevalue("on_two_nodes")
    with ranks_as_threads():
        assert outputs(folder, tensor_parallel_size=2) == first
    own = {core: sum(size for cpus, size in calls if cpus == (core,)) for core in sorted(os.sched_getaffinity(0))[:2]}
    assert sum(own.values()) == sum(size for _, size in calls), "each rank copies on its own core"
    # Both have about a half. Where two parts meet inside a panel, both have it.
    assert 0.7 < own.popitem()[1] / own.popitem()[1] < 1.4
