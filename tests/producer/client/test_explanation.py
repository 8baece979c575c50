"""Explanations of jobs: the parts of their time, and what they wait for, of planted causes."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any, cast

import pytest
from fakes.command import run_command
from fakes.fake_node import POOL, FakeNode
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio import Redis

from penstock.contract.job import SamplingParams
from penstock.contract.output import JobLedger, PastLease
from penstock.producer.client import AsyncClient
from penstock.producer.client.explanation import explain, parts_of
from penstock.queue import keys

ENDS = st.sampled_from(("drain", "pressure", "lacking", "lost", "unlisted"))


@st.composite
def ledgers(draw: st.DrawFn) -> tuple[JobLedger, int, int]:
    """Return a ledger, when the job was due, and a present time."""
    steps = [draw(st.integers(0, 10_000)) for _ in range(12)]
    at_ms = queued_ms = 1_000_000
    submitted_ms = at_ms = at_ms + draw(st.sampled_from((0, 5000)))
    leases = []
    for number in range(draw(st.integers(0, 3))):
        taken_ms = at_ms + steps[2 * number]
        at_ms = taken_ms + steps[2 * number + 1]
        leases.append(PastLease(f"n{number}", taken_ms, at_ms, draw(ENDS)))
    runs, ends = draw(st.booleans()), draw(st.booleans())
    last_ms = at_ms + steps[8]
    first_taken_ms = leases[0].taken_ms if leases else last_ms if runs else 0
    first_ms = last_ms + steps[9] if runs and draw(st.booleans()) else 0
    end_ms = max(last_ms, first_ms) + steps[10]
    ledger = JobLedger(
        "succeeded" if runs and ends else "running" if runs else "queued",
        queued_ms,
        first_taken_ms,
        first_ms,
        end_ms if runs and ends else 0,
        "last" if runs else "",
        retaken_ms=last_ms if runs and leases else 0,
        past_leases=tuple(leases),
        num_past_leases=len(leases),
    )
    return ledger, submitted_ms, end_ms


@given(ledgers())
def test_parts_cover_the_whole_time_of_a_job(found: tuple[JobLedger, int, int]) -> None:
    ledger, submitted_ms, now_ms = found
    parts = parts_of(ledger, submitted_ms, now_ms)
    assert sum(part.seconds for part in parts) == pytest.approx((now_ms - ledger.queued_ms) / 1000)
    nodes = [part.node for part in parts if part.node]
    assert set(nodes) <= {lease.node_id for lease in ledger.past_leases} | {ledger.node_id}
    assert sum(bool(part.ended) for part in parts) == len(ledger.past_leases)


def test_a_moved_job_says_where_its_time_went() -> None:
    ledger = JobLedger(
        "succeeded",
        0,
        1000,
        1500,
        9000,
        "b",
        retaken_ms=6000,
        past_leases=(PastLease("a", 1000, 4000, "lost"),),
        num_past_leases=1,
    )
    assert [(part.seconds, part.text) for part in parts_of(ledger, 0, 9000)] == [
        (1.0, "waited in the queue"),
        (0.5, "until the first token on a"),
        (2.5, "ran on a, which was lost"),
        (2.0, "waited in the queue"),
        (3.0, "ran on b"),
    ]


@pytest.mark.parametrize(
    ("pause", "waits_for"),
    [
        ({}, "a pause of the whole pool"),
        ({"tenant": "acme"}, "a pause of its tenant"),
        ({"priority": "interactive"}, "a pause of its class"),
    ],
)
async def test_paused_job_names_the_pause_and_no_other_tenant(
    redis_url: str, pause: dict[str, Any], waits_for: str
) -> None:
    async with FakeNode(redis_url), AsyncClient(redis_url) as client:
        await client.control.pause(POOL, tenant="rival")
        await client.control.pause(POOL, **pause)
        job = await client.submit("hello", priority=0, tenant="acme")
        told = await explain(client, job.id, tenant="acme")
        assert [cause["waits_for"] for cause in told["waits_for"]] == [waits_for]
        assert "rival" not in json.dumps(told)
        assert told["parts"][-1]["part"] == "queue"
        await client.control.resume(POOL, **pause)
        assert (await job.result()).text
        told = await explain(client, job.id, tenant="acme")
        assert (told["state"], told["waits_for"]) == ("succeeded", [])
        assert sum(part["seconds"] for part in told["parts"]) == pytest.approx(told["seconds"], abs=0.01)


async def test_job_says_when_it_starts_and_what_ended_it(redis_url: str) -> None:
    async with FakeNode(redis_url), AsyncClient(redis_url) as client:
        job = await client.submit("hello", not_before_s=600, params=SamplingParams())
        told = await explain(client, job.id)
        (cause,) = told["waits_for"]
        assert re.fullmatch(r"its start time, in (600|59\d)\.\d s", cause["waits_for"])
        await job.cancel()
        told = await explain(client, job.id)
        assert (told["state"], told["code"], told["waits_for"]) == ("cancelled", "cancelled", [])


async def test_job_without_a_node_says_so(redis_url: str, redis: Redis) -> None:
    async with AsyncClient(redis_url) as client:
        async with FakeNode(redis_url):
            await client.control.pause(POOL)
            job = await client.submit("hello", background=True)
        await redis.delete(keys.nodes(POOL))
        told = await explain(client, job.id)
        assert f"a node: pool {POOL} has none that lives" in [one["waits_for"] for one in told["waits_for"]]


async def test_job_that_lost_two_nodes_says_that_it_may_have_to_run_alone(redis_url: str, redis: Redis) -> None:
    async with FakeNode(redis_url), AsyncClient(redis_url) as client:
        await client.control.pause(POOL)
        job = await client.submit("hello", background=True)
        await cast(Any, redis.hset(keys.job(job.id), "losses", "2"))
        told = {one["waits_for"][:34]: one["helps"] for one in (await explain(client, job.id))["waits_for"]}
        assert "`penstock jobs cancel ID`" in told["an empty node: 2 nodes were lost w"]
        done = await asyncio.to_thread(run_command, "jobs", "cancel", job.id, "--redis-url", redis_url)
        assert (done.returncode, (await job.status()).state) == (0, "cancelled")
