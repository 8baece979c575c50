"""The span of a lease says what the node's ranks spent at meetings while it lasted."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from penstock.contract.job import SamplingParams
from penstock.contract.output import Outcome, Usage
from penstock.gpu_node.engine import RankStats
from penstock.gpu_node.jobs.held_job import HeldJob
from penstock.gpu_node.jobs.times import EndedJob
from penstock.gpu_node.monitor.job_spans import JobSpans
from penstock.queue.broker.node import Taken
from penstock.queue.wire import Request
from penstock.runtime.tracing.export import Tracing

TRACE = ("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",)
BEFORE = RankStats(
    *(4, 1, (0.5, 0.25, 3.0, 3.5), (0.125, 0.25, 0.25, 0.5), 1000), num_stages=2, num_steps=70, stepped_s=6.0
)
AFTER = RankStats(
    *(4, 1, (1.0, 0.25, 5.0, 4.5), (0.25, 0.5, 0.25, 0.5), 1400, (7, 8, 9, 10)),
    num_stages=2,
    num_steps=90,
    stepped_s=10.0,
)
ENDED = EndedJob(Outcome("succeeded"), "stop", Usage(100, 50, 20), max_tokens=64, num_choices=1, longest_output=50)


async def no_leases(job_id: str) -> tuple[()]:
    """The past leases of a job that had none."""
    return ()


async def _lease(*ranks: RankStats) -> Mapping[str, Any]:
    """Return what the span of a lease says of ranks; ranks: those at its begin and at its end."""
    kept, seen = InMemorySpanExporter(), iter(ranks)
    tracing = Tracing(None, "node", kept)
    spans = JobSpans(tracing, no_leases, node_id="n", model="m", ranks=lambda: next(seen))
    job = HeldJob(Taken("m.1", "1:a:1", 0, 0, 100, 0, tenant="acme", taken_ms=1), time.monotonic())
    job.times.last_token_s = {0: job.times.taken_s + 1.0}
    await spans.taken(job, Request(SamplingParams(), prompt="hello", trace=TRACE))
    spans.ended(job, ENDED, job.times.taken_s + 1.1)
    tracing.close()
    (lease,) = [span for span in kept.get_finished_spans() if span.name == "text_completion m"]
    assert lease.attributes is not None
    return {name: value for name, value in lease.attributes.items() if "rank" in name or "stage" in name}


async def test_a_lease_has_what_the_ranks_spent_meanwhile() -> None:
    assert await _lease(BEFORE, AFTER) == {
        "penstock.ranks": 4,
        "penstock.stages": 2,
        "penstock.ranks.meetings": 400,
        "penstock.ranks.steps": 20,
        "penstock.ranks.stage_idle": (0.0625, 0.375),
        "penstock.ranks.weight_bytes": (7, 8, 9, 10),
        "penstock.ranks.waited_s": (0.5, 0.0, 2.0, 1.0),
        "penstock.ranks.exchanged_s": (0.125, 0.25, 0.0, 0.0),
    }


@pytest.mark.parametrize("at_end", [RankStats(4, 2, (0.1,) * 4, (0.1,) * 4, 9), RankStats(4, 2, lost="rank 1 ended")])
async def test_a_lease_during_which_a_rank_was_lost_says_so(at_end: RankStats) -> None:
    """The counts began anew with the ranks."""
    assert await _lease(BEFORE, at_end) == {"penstock.ranks": 4, "penstock.stages": 1, "penstock.ranks.losses": 1}


async def test_a_lease_of_a_node_without_ranks_says_nothing_of_them() -> None:
    assert await _lease(RankStats(), RankStats()) == {}
