"""What is seen of a node names the part that is unhealthy, once, and for long enough to be noticed."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
from fakes.processes.reference_engine import ReferenceEngine

from penstock.gpu_node.service.health import REMEMBERED_S, Health, HealthSample

WELL = HealthSample(
    now_s=1000.0,
    wall_s=5000.0,
    late_s=0.01,
    stats=replace(ReferenceEngine().stats(), steps=100, max_step_tokens=512),
    engine_stalled_s=0.1,
    lost_ranks="",
    redis_silent_s=2.0,
    hears_doorbell=True,
    unsent_bytes=0,
    failing="",
    max_unsent_bytes=1 << 20,
    num_tokenizer_failures=0,
)


def later(signs: HealthSample, by_s: float = 2.0, **changes: Any) -> HealthSample:
    """Return the sample of a while later; the engine's statistics are given by name."""
    stats = {name: changes.pop(name) for name in list(changes) if name not in HealthSample.__slots__}
    moved = {"now_s": signs.now_s + by_s, "wall_s": signs.wall_s + by_s, "stats": replace(signs.stats, **stats)}
    return replace(signs, **moved | changes)


@pytest.mark.parametrize(
    ("changes", "part", "why"),
    [
        ({"engine_stalled_s": 12.0}, "engine", "has made no step for 12 s"),
        ({"lost_ranks": "rank 1 ended"}, "ranks", "are being started again: rank 1 ended"),
        ({"num_failed_steps": 3}, "runner", "3 steps failed"),
        ({"grammar_host_failures": 1}, "grammars", "requests with structured output fail until the node is restarted"),
        ({"num_failed_steps": 3, "num_memory_failures": 3}, "memory", "3 steps ran out of memory"),
        ({"max_step_tokens": 64}, "memory", "steps are limited to 64 of 512 tokens"),
        ({"steps": 200, "num_preemptions": 50}, "memory", "50 preemptions in 100 steps"),
        ({"redis_silent_s": 30.0}, "redis", "has not answered for 30 s"),
        ({"hears_doorbell": False}, "doorbell", "the subscription is lost: new jobs are found by polling"),
        ({"unsent_bytes": 600 << 10}, "outbox", "600 of 1024 KiB wait for Redis"),
        ({"num_tokenizer_failures": 2}, "tokenizer", "failed at 2 prompts"),
        ({"late_s": 3.0}, "loop", "was blocked for 3.0 s"),
        ({"wall_s": 4990.0}, "clock", "jumped by -12.0 s"),
    ],
)
def test_unhealthy_part_is_named(changes: dict[str, Any], part: str, why: str) -> None:
    health = Health()
    assert health.look(WELL) == {}
    assert health.look(later(WELL, **changes)) == {part: why}


def test_ordinary_samples_are_healthy() -> None:
    health = Health()
    health.look(WELL)
    assert health.look(later(WELL, steps=200, num_preemptions=5, unsent_bytes=1000, engine_stalled_s=2.0)) == {}


def test_transient_problem_is_then_reported_as_past_for_a_while_and_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    health = Health()
    health.look(WELL)
    with caplog.at_level(logging.INFO):
        seen = later(WELL, num_failed_steps=1)
        assert health.look(seen) == {"runner": "1 steps failed"}
        seen = later(seen, num_failed_steps=3)
        assert health.look(seen) == {"runner": "2 steps failed"}
        # From the next sample on it is past.
        seen = later(seen, REMEMBERED_S)
        assert (health.look(seen), health.past) == ({}, {"runner": "2 steps failed"})
        assert (health.look(later(seen)), health.past) == ({}, {})
    said = [(record.message, record.part) for record in caplog.records]  # type: ignore[attr-defined]
    assert said == [("a part of this node is unhealthy", "runner"), ("a part of this node is healthy again", "runner")]


def test_lost_ranks_are_reported_only_until_they_are_back() -> None:
    health = Health()
    health.look(WELL)
    assert list(health.look(seen := later(WELL, lost_ranks="rank 1 ended"))) == ["ranks"]
    assert health.look(later(seen, lost_ranks="")) == {}
