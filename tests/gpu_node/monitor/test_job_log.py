"""A node's log has one line for each job, with its numbers as fields."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from fakes.processes.reference_engine import ReferenceEngine
from fakes.processes.running_node import running_node

from penstock.contract.job import Priority
from penstock.producer.client import AsyncClient

POOL = "logged"


def reference_engine(step_s: float = 0.0) -> Any:
    """An engine without a model; as Any, since its tokenizer has fewer members than a real one."""
    return ReferenceEngine(step_s=step_s)


def lines_of(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [vars(record) for record in caplog.records if record.getMessage() == "job.ended"]


async def until_logged(caplog: pytest.LogCaptureFixture, num_lines: int) -> list[dict[str, Any]]:
    async with asyncio.timeout(10):
        while len(lines_of(caplog)) < num_lines:
            await asyncio.sleep(0.01)
    return lines_of(caplog)


async def test_a_job_that_is_done_has_one_line(redis_url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with running_node(redis_url, reference_engine(step_s=0.001), pool=POOL), AsyncClient(redis_url) as client:
        job = await client.submit("hello", max_tokens=20, tenant="acme", priority=Priority.BATCH)
        await job.result()
        (line,) = await until_logged(caplog, 1)
    expected = {
        "job_id": job.id,
        "model": "reference",
        "tenant": "acme",
        "class": "batch",
        "finish_reason": "length",
        "prompt_tokens": 5,
        "cached_tokens": 0,
        "output_tokens": 20,
        "preemptions": 0,
    }
    assert {name: line[name] for name in expected} == expected
    assert 0 <= line["queue_s"] <= line["ttft_s"] < line["total_s"] < 10
    assert "code" not in line


async def test_a_line_says_how_a_job_ended_that_is_not_done(redis_url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with running_node(redis_url, reference_engine(step_s=0.01), pool=POOL), AsyncClient(redis_url) as client:
        canceled = await client.submit("hello", max_tokens=2000)
        await anext(canceled.stream())
        await canceled.cancel()
        (line,) = await until_logged(caplog, 1)
        assert (line["finish_reason"], line["code"]) == ("cancelled", "cancelled")
        await client.tokenize("three small words")
        *_, line = await until_logged(caplog, 2)
        assert (line["finish_reason"], line["output_tokens"], line["ttft_s"]) == ("stop", 0, None)


async def test_lines_can_be_switched_off(redis_url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with (
        running_node(redis_url, reference_engine(), pool=POOL, log_jobs=False) as node,
        AsyncClient(redis_url) as client,
        asyncio.timeout(10),
    ):
        await (await client.submit("hello", max_tokens=5)).result()
        while node.ledger.counts.finished < 1:
            await asyncio.sleep(0.01)
    assert lines_of(caplog) == []
