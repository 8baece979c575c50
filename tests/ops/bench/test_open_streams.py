"""The benchmark of open streams: what its node sends, and what its reader counts."""

from __future__ import annotations

import os
import sys

import pytest
from bench.open_streams import measure as measuring
from bench.open_streams.emit_calls import FIRST_TOKEN, EmitCall, text_of
from bench.open_streams.measure import Setup, measure_rates, measure_stopped
from bench.open_streams.processes import Cores
from bench.open_streams.report import Scene, report

from penstock.contract.output import Chunk
from penstock.queue.broker import scripts
from penstock.queue.wire import encode_chunk
from tests.source_tree import ROOT

JOBS = [(f"stub.{number:036d}", f"lease-{number}") for number in range(20)]
NUM_STREAMS, PER_S, SECONDS = 10, 200, 0.5


@pytest.mark.parametrize("num_chars", [0, 300, 1000])
@pytest.mark.parametrize("num_jobs", [1, 20])
def test_calls_have_the_bytes_that_a_node_sends(num_jobs: int, num_chars: int) -> None:
    jobs = JOBS[:num_jobs]
    call = EmitCall(jobs, next_index=1)
    for index in (1, 2, 3):
        text = text_of(5, index, num_chars)
        chunks = [encode_chunk(Chunk(job, index, 0, index, (FIRST_TOKEN + index,), text)) for job, _ in jobs]
        rows = [(job, lease, index, (chunk,), "") for (job, lease), chunk in zip(jobs, chunks, strict=True)]
        if index < 3:
            assert call.rows(5, num_chars) == scripts.packed(rows)
        else:
            assert call.message(5, num_chars) == b"".join(chunks)


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch) -> Setup:
    # The node is a process of the bench too.
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "ops"))
    monkeypatch.setattr(measuring, "WARM_S", 0.2)
    monkeypatch.setattr(measuring, "FILL_S", 0.2)
    return Setup(SECONDS, 4, Cores.of_this_machine(pinned=False))


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["SSE", "WebSocket"])
def test_every_event_of_every_stream_arrives_in_order(setup: Setup, transport: str) -> None:
    cores = os.sched_getaffinity(0)
    script, direct = measure_rates(sys.executable, NUM_STREAMS, [PER_S], [PER_S], setup, transport)
    for found in (script, direct):
        # Each round has a chunk for every stream; the interval may begin and end inside a round.
        assert abs(found["num_events"] - PER_S * SECONDS) <= 2 * NUM_STREAMS
        assert 0 < found["latency_p50_ms"] <= found["latency_p99_ms"] <= found["latency_max_ms"]
        assert found["gateway_us_per_event"] > 0
        assert found["transport"] == transport
    assert os.sched_getaffinity(0) == cores


@pytest.mark.slow
def test_gaps_are_measured_before_and_after_readers_stop(setup: Setup) -> None:
    found = measure_stopped(sys.executable, NUM_STREAMS, 3, PER_S, setup)
    for when in ("quiet", "stopped"):
        assert found[when]["gap_p99_ms"] > 0
    # Readers that stopped count no more.
    assert found["stopped"]["num_events"] < 0.85 * found["quiet"]["num_events"]
    lines = report(
        Scene({"cores": 2, "cpu": "x", "date": "today"}, "1", "", pinned=False), [], [found | {"gateway": "g"}]
    )
    assert f"| {NUM_STREAMS} | 3 |" in lines[-1]
