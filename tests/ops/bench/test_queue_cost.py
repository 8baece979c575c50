"""The clock that replaces an engine, and the readers that count the chunks."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from bench.queue_cost.clock import SPOKEN, STAMP, ClockEngine
from bench.queue_cost.processes import CpuMeter, gateway, node
from bench.queue_cost.streams import read_http, read_streams

from penstock import AsyncClient
from penstock.contract.job import SamplingParams
from penstock.gpu_node.engine.records import EngineRequest
from penstock.runtime.embedded_redis import EmbeddedRedis
from tests.source_tree import ROOT

STEP_MS = 5.0
NUM_STREAMS, NUM_TOKENS = 3, 4


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmbeddedRedis]:
    # The node is a process of the bench too.
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "ops"))
    with EmbeddedRedis() as server:
        yield server


def test_every_sequence_gains_one_token_a_step_until_it_has_all() -> None:
    engine = ClockEngine(0.0)
    for name, num_tokens in (("short", 1), ("long", 3)):
        engine.add(EngineRequest(name, [SPOKEN] * 8, SamplingParams(max_tokens=num_tokens), seed=0))
    steps = []
    while engine.has_work():
        steps.append([(output.request_id, output.position, output.finish_reason) for output in engine.step()])
    assert steps == [[("short", 0, "length"), ("long", 0, None)], [("long", 1, None)], [("long", 2, "length")]]


def test_a_stamped_sequence_says_when_it_was_added_and_stepped() -> None:
    engine = ClockEngine(0.0)
    engine.add(EngineRequest("0", [STAMP], SamplingParams(max_tokens=1), seed=0))
    [output] = engine.step()
    added_ns, stepped_ns = map(int, output.text.split())
    assert added_ns <= stepped_ns


async def test_readers_count_every_token_of_every_stream(server: EmbeddedRedis) -> None:
    with (
        node(server.url, STEP_MS) as (node_pid, _),
        gateway(server.url) as (gateway_pid, said),
        CpuMeter({"node": node_pid, "gateway": gateway_pid, "reader": os.getpid()}) as meter,
    ):
        async with AsyncClient(server.url) as client:
            num_tokens, lags_ms = await read_streams(client, NUM_STREAMS, NUM_TOKENS)
        num_events, http_lags_ms = await read_http(said["url"], NUM_STREAMS, NUM_TOKENS)
    assert num_tokens == NUM_STREAMS * NUM_TOKENS
    # Steps that the outbox joined give one event.
    assert NUM_STREAMS <= num_events <= NUM_STREAMS * NUM_TOKENS
    assert min(lags_ms) >= 0
    assert min(http_lags_ms) >= 0
    assert set(meter.spent_us) == {"node loop", "node engine", "gateway", "reader"}
    assert min(meter.spent_us.values()) > 0
