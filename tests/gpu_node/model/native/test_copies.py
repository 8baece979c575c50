"""Copies of blocks that a step begins with, on both runners."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from fakes.cover import examples
from fakes.runners.runner_options import runner_options
from fixtures.plans import Track, plan_of
from fixtures.sampling import rows_of

from penstock.gpu_node.model.loading.load import load_model
from penstock.gpu_node.model.protocol import ModelRunner

NUM_BLOCKS = 24


@pytest.fixture(scope="module", params=[("torch", 1), ("native", 1), ("native", 3)])
def runner(request: pytest.FixtureRequest, tiny_model: Path, best_library: Path) -> ModelRunner:
    kind, num_threads = request.param
    options = runner_options(
        runner=kind,
        dtype="bfloat16",
        quantization="none" if kind == "native" else "auto",
        num_kv_blocks=NUM_BLOCKS // 2,
        num_swap_blocks=NUM_BLOCKS // 2,
        num_threads=num_threads,
    )
    return load_model(str(tiny_model), options, lambda stage, fraction: None).runner


def _token(runner: ModelRunner, track: Track, count: int, copies: list[tuple[int, int]] | None = None) -> int:
    """Advance a track, behind some copies; what it samples."""
    plan = plan_of([(track, count)], rows_of(1, temperature=0.0), copies=copies or [])
    track.done += count
    return int(runner.submit(plan).result().tokens[0])


def test_any_list_of_copies_leaves_what_copying_one_by_one_would(runner: ModelRunner) -> None:
    """Every block holds the context of one track; after the copies a track reads wherever its context went."""
    rng = random.Random(0)
    contexts = {block: [rng.randrange(300) for _ in range(16)] for block in range(1, NUM_BLOCKS)}
    want = {block: _token(runner, Track([*ids, 7], [block, NUM_BLOCKS]), 17) for block, ids in contexts.items()}
    assert len(set(want.values())) > len(want) / 2
    for _ in range(examples(20)):
        for block in want:
            _token(runner, Track(contexts[block], [block]), 16)
        holds = {block: block for block in want}
        copies = [(rng.randrange(1, NUM_BLOCKS), rng.randrange(1, NUM_BLOCKS)) for _ in range(rng.randrange(1, 12))]
        for source, target in copies:
            holds[target] = holds[source]
        for i, block in enumerate(rng.sample(sorted(holds), 6)):
            track = Track([*contexts[holds[block]], 7], [block, NUM_BLOCKS], done=16)
            assert _token(runner, track, 1, copies if i == 0 else None) == want[holds[block]]


def test_the_time_that_copies_take_is_reported(runner: ModelRunner) -> None:
    plan = plan_of([(Track([1, 2, 3], [1]), 3)], rows_of(1, temperature=0.0), copies=[(2, 3)])
    assert runner.submit(plan).result().copy_ms > 0


def test_host_blocks_lie_behind_the_device_blocks(runner: ModelRunner) -> None:
    sizes = runner.cache_sizes
    assert (sizes.num_device_blocks, sizes.num_host_blocks, sizes.num_blocks) == (12, 12, 25)
    assert sizes.block_bytes == 2 * 2 * 2 * 16 * 16 * np.dtype(np.float16).itemsize
