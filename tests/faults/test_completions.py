"""Readers of completions across a restart of Redis, a loss of its newest writes, and a campaign's own checks."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any, cast

import pytest
from fakes.fake_node import MODEL, POOL, FakeNode
from faults.tools.backlog_kills import FeedReader
from faults.tools.redis_process import RedisProcess

from penstock.producer.client import AsyncClient, ClientSettings
from penstock.queue.broker.completions import CompletionCursor, CompletionGap

SETTINGS = ClientSettings(outage_s=20.0, echo_interval_s=0.1, silent_after_s=0.4)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[RedisProcess]:
    with RedisProcess(tmp_path / "redis", appendfsync="always") as server:
        yield server


async def finished(client: AsyncClient, count: int) -> list[str]:
    ids = []
    for _ in range(count):
        job = await client.submit("hello", model=MODEL, max_tokens=2)
        await job.result()
        ids.append(job.id)
    return ids


async def read(client: AsyncClient, after: str, count: int) -> list[tuple[str, str]]:
    async with aclosing(client.completions(after)) as source:
        return [(cursor, done.job_id) for cursor, done in [await anext(source) for _ in range(count)]]


async def test_a_cursor_survives_a_kill_of_redis_with_an_append_only_file(server: RedisProcess) -> None:
    async with AsyncClient(server.url, settings=SETTINGS) as client:
        start = await client.completions_cursor()
        async with FakeNode(server.url):
            ids = await finished(client, 5)
        reader = client.completions(start)
        async with aclosing(reader):
            found = [await anext(reader) for _ in range(2)]
            server.kill()
            server.start()
            async with FakeNode(server.url):
                ids += await finished(client, 2)
            found += [await anext(reader) for _ in range(5)]
        assert [done.job_id for _, done in found] == ids
        assert [job_id for _, job_id in await read(client, found[3][0], 3)] == ids[4:]


async def test_an_old_cursor_is_told_that_redis_lost_writes_and_jobs_keep_their_ids(server: RedisProcess) -> None:
    async with AsyncClient(server.url, settings=SETTINGS) as client:
        async with FakeNode(server.url):
            start = await client.completions_cursor()
            known = await finished(client, 2)
        job = await client.submit("hello", model=MODEL, max_tokens=2)
        copy = server.copy_log()
        async with FakeNode(server.url):
            await job.result()
        found = await read(client, start, 3)
        assert [job_id for _, job_id in found] == [*known, job.id]
        server.restart_from(copy)
        async with FakeNode(server.url):
            await (await client.attach(job.id)).result()

        feed, told = client.feed, list[Any]()
        async for page in feed.pages(CompletionCursor.parse(found[-1][0], "default")):
            told += [event.item for event in page.events]
            if any(getattr(item, "job_id", "") == job.id for item in told):
                break
        assert isinstance(told[0], CompletionGap) and (told[0].pool, told[0].reason) == (POOL, "lost")
        assert [item.job_id for item in told[1:]] == [*known, job.id]
        assert {job_id for _, job_id in await read(client, found[-1][0], 3)} == {*known, job.id}
        # What the cursor knows is still there, so nothing is told.
        assert [job_id for _, job_id in await read(client, found[1][0], 1)] == [job.id]


def test_a_missing_repeated_or_strange_completion_is_noticed(tmp_path: Path) -> None:
    reader = object.__new__(FeedReader)
    reader.kind, output = "python", tmp_path / "out"
    cast(Any, reader)._output = output
    output.write_text("".join(json.dumps(["c", job_id, "succeeded"]) + "\n" for job_id in "abbx") + '["half')
    assert reader.problems("abc") == [
        "completions by python: 1 missing: ['c']",
        "completions by python: 1 repeated: ['b']",
        "completions by python: 1 strange: ['x']",
    ]
    assert reader.problems("abx")[0] == "completions by python: 1 repeated: ['b']"
