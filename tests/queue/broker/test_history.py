"""A process notices a new history of Redis, compares once, and leaves a server that is no primary any more."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from fakes.queue.older_history import NOWHERE, new_history
from fakes.waiting import until
from faults.tools.redis_process import RedisProcess, free_port
from redis.asyncio import Redis

from penstock.contract.errors import ConflictError, UnavailableError
from penstock.queue.broker import history
from penstock.queue.broker.connection import connect
from penstock.queue.broker.history import HistoryWatch, RecentCalls
from penstock.queue.broker.shared_connection import SharedRedis
from penstock.runtime.event_loop import cancel_until_done


@pytest.fixture(autouse=True)
def _quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "LOOK_S", 0.02)
    monkeypatch.setattr(history, "RETRY_S", 0.02)


@asynccontextmanager
async def watched(redis: Redis, compare: Callable[[], Awaitable[None]]) -> AsyncIterator[HistoryWatch]:
    """Run a watch that has looked once."""
    watch = HistoryWatch(redis, compare, name="test")
    task = asyncio.create_task(watch.run())
    try:
        await redis.ping()
        await until(lambda: watch.is_compared)
        yield watch
    finally:
        await cancel_until_done((task,))


class Comparisons:
    """Counts comparisons; the first ones fail with the given errors."""

    def __init__(self, *errors: Exception) -> None:
        self.errors, self.count = list(errors), 0

    async def __call__(self) -> None:
        self.count += 1
        if self.errors:
            raise self.errors.pop(0)


async def looks(redis: Redis, number: int = 3) -> None:
    """Wait for some more looks."""
    before = await _info_calls(redis)
    await until(lambda: _info_calls(redis), lambda seen: seen >= before + 2 * number)


async def _info_calls(redis: Redis) -> int:
    return int((await redis.info("commandstats"))["cmdstat_info"]["calls"])


async def test_a_new_history_is_compared_once_and_named_with_the_old_one(
    redis: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    compared = Comparisons()
    async with watched(redis, compared):
        old = (await redis.info("replication"))["master_replid"]
        await new_history(redis)
        new = (await redis.info("replication"))["master_replid"]
        await until(lambda: compared.count == 1)
        await looks(redis)
    assert compared.count == 1
    (record,) = [one for one in caplog.records if one.message == "redis has a new history"]
    assert old != new and vars(record)["old"].startswith(old) and vars(record)["new"].startswith(new)


async def test_a_comparison_that_redis_interrupts_is_repeated_and_one_that_it_refuses_is_not(redis: Redis) -> None:
    compared = Comparisons(UnavailableError("cut"), UnavailableError("cut"), ConflictError("no"))
    async with watched(redis, compared) as watch:
        await new_history(redis)
        await until(lambda: compared.count == 3)
        await looks(redis)
        assert compared.count == 3 and watch.is_compared


async def test_nothing_is_compared_without_a_new_history(redis: Redis) -> None:
    compared = Comparisons()
    async with watched(redis, compared) as watch:
        assert isinstance(redis, SharedRedis)
        await redis.close_lines(ConnectionError("cut"))
        with suppress(UnavailableError, Exception):
            await redis.ping()
        await until(lambda: watch.is_compared)
        await looks(redis)
    assert not compared.count


async def test_connections_to_a_server_that_became_a_replica_are_closed(redis: Redis, tmp_path: Path) -> None:
    async with watched(redis, Comparisons()):
        assert isinstance(redis, SharedRedis)
        (line,) = redis.lines
        try:
            await redis.execute_command("REPLICAOF", *NOWHERE)
            await until(line.lost.done)
        finally:
            await until(lambda: redis.execute_command("REPLICAOF", "NO", "ONE"), but=Exception)


async def test_a_restarted_server_has_a_new_history(tmp_path: Path) -> None:
    with RedisProcess(tmp_path / "redis") as server:
        redis, compared = connect(server.url), Comparisons()
        async with watched(redis, compared):
            server.kill()
            await asyncio.to_thread(server.start)
            await until(lambda: compared.count == 1)
        await redis.aclose()


async def test_connections_are_closed_when_the_name_of_the_server_leads_to_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old server still answers: nothing but the name says that it is not the primary any more."""
    port, target = free_port(), "127.0.0.1"

    def resolve(host: str, port: int, *args: Any, **options: Any) -> list[Any]:
        place = target if host == "redis.test" else host
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (place, port))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with (
        RedisProcess(tmp_path / "old", port=port, bind="127.0.0.1"),
        RedisProcess(tmp_path / "new", port=port, bind="127.0.0.2"),
    ):
        redis, compared = connect(f"redis://redis.test:{port}"), Comparisons()
        async with watched(redis, compared):
            await redis.set("which", "old")
            target = "127.0.0.2"
            await until(lambda: compared.count == 1)
            assert await redis.get("which") is None
        await redis.aclose()


async def test_recent_calls_are_repeated_in_order_and_refusals_are_ignored() -> None:
    recent, done = RecentCalls(30), list[int]()

    async def call(number: int) -> None:
        done.append(number)
        if number == 1:
            raise ConflictError("it has ended")

    for number in range(3):
        recent.note(lambda number=number: call(number))  # type: ignore[misc]
    assert await recent.repeat() == 3 and done == [0, 1, 2]
    assert await RecentCalls(30).repeat() == 0


async def test_old_calls_are_not_repeated() -> None:
    recent = RecentCalls(0.01)
    recent.note(lambda: asyncio.sleep(0))
    await asyncio.sleep(0.02)
    assert await recent.repeat() == 0
