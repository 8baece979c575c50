"""Jobs of what an operator has paused: callers who wait are refused, background work waits, and every view says so."""

from __future__ import annotations

import pytest
from fakes.fake_node import POOL, FakeNode

from penstock.contract.errors import UnavailableError
from penstock.contract.output import QueuePosition
from penstock.producer.client import AsyncClient, explanation
from penstock.producer.client.job_objects import queue_members


@pytest.mark.parametrize(
    ("paused", "kind", "words"),
    [
        ({}, "pool", "the pool is paused"),
        ({"priority": "standard"}, "class", "class standard"),
        ({"tenant": "acme"}, "tenant", "tenant acme"),
    ],
)
async def test_callers_who_wait_are_refused_and_background_work_waits(
    client: AsyncClient, told_node: FakeNode, paused: dict[str, str], kind: str, words: str
) -> None:
    await client.control.pause(POOL, **paused)  # type: ignore[arg-type]
    with pytest.raises(UnavailableError, match=words) as caught:
        await client.submit("hello", background=False, tenant="acme")
    assert (caught.value.code, caught.value.status, caught.value.retry_after_ms > 0) == ("pool_paused", 503, True)
    assert client.stats.decisions["paused"] == 1
    for options in ({"background": True}, {"background": False, "queue_without_node": True}):
        job = await client.submit("hello", tenant="acme", priority="standard", **options)  # type: ignore[arg-type]
        status = await job.status()
        assert (status.state, status.queue_position) == ("queued", QueuePosition(1, paused=kind))  # type: ignore[arg-type]
        shown = queue_members(status)
        assert (shown["estimated_wait_ms"], shown["paused"]) == (None, kind)
        causes = (await explanation.explain(client, job.id, tenant="acme"))["waits_for"]
        assert "pause" in causes[0]["waits_for"]
        await job.cancel()
    await client.control.resume(POOL, **paused)  # type: ignore[arg-type]
    await (await client.submit("hello", background=False, tenant="acme")).cancel()


async def test_another_class_and_tenant_go_on(client: AsyncClient, told_node: FakeNode) -> None:
    await client.control.pause(POOL, tenant="acme")
    await client.control.pause(POOL, priority="batch", background=True)
    job = await client.submit("hello", background=False, priority="batch", tenant="rival")
    position = (await job.status()).queue_position
    assert position is None or position.paused is None


async def test_a_pause_is_an_update_of_a_waiting_job(client: AsyncClient, told_node: FakeNode) -> None:
    job = await client.submit("hello", background=False)
    updates = job.waiting()
    assert (await anext(updates)).paused is None  # type: ignore[union-attr]
    await client.control.pause(POOL)
    assert await anext(updates) == QueuePosition(1, paused="pool")
    await updates.aclose()


async def test_the_stats_of_a_paused_pool_name_the_pause_and_no_backlog(
    client: AsyncClient, told_node: FakeNode
) -> None:
    await client.submit("hello")
    await client.control.pause(POOL)
    ((pool, *_), _) = await client.pool_stats()
    assert [one.words for one in pool.pauses] == ["the pool"]
    assert pool.queue.backlog_s == (None, None)
