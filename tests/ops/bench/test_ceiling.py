"""The waiting GPU around a real engine, and the CPU time of its parts."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from bench.queue_cost.ceiling import ROWS, by_client, table_of
from bench.queue_cost.cpu_parts import CpuParts
from bench.queue_cost.waiting_gpu import make_engine
from fixtures.tiny_model import make_tiny_model

from penstock.contract.job import SamplingParams
from penstock.runtime.embedded_redis import EmbeddedRedis
from tests.source_tree import ROOT

STEP_S = 0.004


def _work(seconds: float) -> None:
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        pass


class Worker:
    """Calls one method from the other."""

    def outer(self) -> None:
        """Take 4 ms, of which the inner method takes 3."""
        _work(0.001)
        self.inner()

    def inner(self) -> None:
        """Take 3 ms."""
        _work(0.003)


def test_a_part_does_not_count_the_parts_that_it_calls() -> None:
    class Watched(Worker):
        pass

    parts = CpuParts()
    parts.watch(Watched, "outer", "outer")
    parts.watch(Watched, "inner", "inner")
    Watched().outer()
    assert parts.spent_us["inner"] >= 3000
    assert 1000 <= parts.spent_us["outer"] < 3000


def test_the_engine_waits_for_a_gpu_whose_steps_only_take_time(tmp_path: Path) -> None:
    engine, gpu = make_engine(str(make_tiny_model(tmp_path)), STEP_S, 2)
    began_s = time.perf_counter()
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    generations = engine.generate([[5, 6, 7], [8, 9]], [params, params])
    took_s = time.perf_counter() - began_s
    assert [len(generation.token_ids) for generation in generations] == [5, 5]
    assert set(generations[0].token_ids) <= set(gpu.text.tolist())
    assert gpu.num_steps >= 5
    assert took_s >= gpu.num_steps * STEP_S


@pytest.mark.slow
async def test_the_ceiling_has_a_row_for_each_thread_and_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "ops"))
    with EmbeddedRedis() as server:
        got = await by_client(server, 1.0, 3, 400)
    # The tokens of a step at each end of the window may be counted without their step.
    assert 2 < got.rows <= 3.1
    assert got.tokens_per_s <= 3 / 0.001
    table = table_of(got)
    assert all(name in table for name, (key, _) in ROWS.items() if key != "gateway")
