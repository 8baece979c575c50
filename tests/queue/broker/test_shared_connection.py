"""The connection that many calls share: order, connection loss, timeouts, and messages between replies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from fakes.waiting import until
from redis import exceptions
from redis.asyncio import Redis

from penstock.contract.errors import UnavailableError
from penstock.queue.broker import shared_connection as line_module
from penstock.queue.broker.connection import connect, translated
from penstock.queue.broker.shared_connection import SharedConnection

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


LENGTHS = "return {#ARGV[1], ARGV[2]}"


class Recorder:
    """A transport that records the size of each write."""

    def __init__(self, transport: asyncio.Transport, sizes: list[int]) -> None:
        self._transport = transport
        self._sizes = sizes

    def write(self, data: bytes | memoryview) -> None:
        self._sizes.append(len(data))
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


@pytest.fixture
async def line(redis: Redis) -> AsyncIterator[SharedConnection]:
    opened = await SharedConnection.open(redis)
    yield opened
    opened.close()


async def test_answers_come_to_their_calls_in_order(line: SharedConnection) -> None:
    calls = [line.call("ECHO", str(i)) for i in range(1000)]
    assert await asyncio.gather(*calls) == [str(i).encode() for i in range(1000)]


async def test_refused_call_affects_no_other_call(line: SharedConnection) -> None:
    before, bad, after = line.call("ECHO", "1"), line.call("NONSENSE"), line.call("ECHO", "2")
    assert await before == b"1"
    with pytest.raises(exceptions.ResponseError, match="unknown command"):
        await bad
    assert await after == b"2"


async def test_canceled_call_does_not_shift_the_answers(line: SharedConnection) -> None:
    calls = [line.call("ECHO", str(i)) for i in range(10)]
    calls[3].cancel()
    done = await asyncio.gather(*calls, return_exceptions=True)
    assert [a for a in done if isinstance(a, bytes)] == [str(i).encode() for i in range(10) if i != 3]


async def test_large_arguments_are_sent_in_pieces_and_keep_the_order_of_calls(
    line: SharedConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = list[int]()
    monkeypatch.setattr(line, "_transport", Recorder(line._transport, sizes))
    large = bytes(range(256)) * (40 << 10)
    calls = [
        line.call("ECHO", "1"),
        line.call("ECHO", large),
        line.call("ECHO", 2),
        line.call("EVAL", LENGTHS, 0, large, 3.5),
    ]
    last = line.call("ECHO", "é")
    answers = await asyncio.gather(*calls, last)
    assert answers == [b"1", large, b"2", [len(large), b"3.5"], "é".encode()]
    assert max(sizes) <= line_module.PIECE_BYTES and sum(sizes) > 2 * len(large)


async def test_large_call_being_sent_fails_when_the_connection_is_closed(line: SharedConnection) -> None:
    call = line.call("ECHO", b"x" * (64 << 20))
    line.close()
    with pytest.raises(exceptions.ConnectionError):
        await call


async def test_pending_and_later_calls_fail_when_the_connection_is_lost(line: SharedConnection, redis: Redis) -> None:
    number = await line.call("CLIENT", "ID")
    waits = line.call("BLPOP", "nothing", "0")
    await redis.client_kill_filter(_id=number)
    for call in (waits, line.call("PING")):
        with pytest.raises(UnavailableError), translated():
            await call


async def test_commands_use_a_new_connection_after_a_lost_one(redis_url: str, redis: Redis) -> None:
    other = connect(redis_url)
    await redis.client_kill_filter(_id=await other.client_id())
    with suppress(exceptions.ConnectionError):  # where the cut was not noticed yet
        await other.ping()
    assert await other.ping() is True
    await other.aclose()


async def test_calls_that_wait_for_a_connection_fail_together_when_there_is_none(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_tried, gate = 0, asyncio.Event()

    async def fail(*_: Any) -> SharedConnection:
        nonlocal num_tried
        num_tried += 1
        await gate.wait()
        raise exceptions.TimeoutError("no answer")

    client = connect(redis_url)
    with monkeypatch.context() as patched:
        patched.setattr(SharedConnection, "open", fail)
        calls = [asyncio.ensure_future(client.ping()) for _ in range(20)]
        await asyncio.sleep(0)
        gate.set()
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(answer) for answer in answers} == {exceptions.TimeoutError}
        assert num_tried == 1
        with pytest.raises(exceptions.TimeoutError):
            await client.ping()
        assert num_tried == 2, "who comes later tries again"
    assert await client.ping() is True
    await client.aclose()


async def test_connection_to_a_master_that_became_a_replica_is_closed(redis_url: str, redis: Redis) -> None:
    other, script = connect(redis_url), "return redis.call('SET', KEYS[1], '1')"
    number = await other.client_id()
    await redis.replicaof("127.0.0.1", "1")
    try:
        with pytest.raises(UnavailableError), translated():
            await other.eval(script, 1, "key")
    finally:
        await redis.replicaof("NO", "ONE")
    assert await other.client_id() != number
    await other.aclose()


async def test_messages_arrive_in_order_and_readers_run_between_two(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a machine with other work Redis may be held up for longer than the ten seconds after which it counts as away.
    monkeypatch.setattr(line_module, "REPLY_TIMEOUT_S", 100.0)
    heard: list[bytes] = []
    most_at_once = at_once = 0

    def hear(_: bytes, message: bytes) -> None:
        nonlocal at_once, most_at_once
        at_once += 1
        most_at_once = max(most_at_once, at_once)
        heard.append(message)
        asyncio.get_running_loop().call_soon(turn)

    def turn() -> None:
        nonlocal at_once
        at_once = 0

    subscription = await SharedConnection.open(redis, hear)
    await subscription.call("SUBSCRIBE", "news")
    sent = [str(i).encode() * 500 for i in range(2000)]
    await asyncio.gather(*(redis.publish("news", message) for message in sent))
    await subscription.call("PING")
    await until(lambda: len(heard) >= len(sent))
    assert heard == sent
    assert most_at_once == 1
    subscription.close()


@asynccontextmanager
async def line_to(folder: Path, serve: Serve) -> AsyncIterator[SharedConnection]:
    """Return a connection that a server that imitates Redis has accepted."""
    serving: set[Any] = set()
    is_accepted = asyncio.Event()

    async def noted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.add(asyncio.current_task())
        is_accepted.set()
        await serve(reader, writer)
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_unix_server(noted, folder / "s"):
        _, writer = await asyncio.open_unix_connection(folder / "s")
        line = SharedConnection(writer, None)
        await is_accepted.wait()
        yield line
        line.close()
        await asyncio.wait(serving)


async def test_redis_that_does_not_answer_is_unreachable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_module, "REPLY_TIMEOUT_S", 0.05)

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with line_to(tmp_path, silent) as line:
        for answer in await asyncio.gather(line.call("PING"), line.call("PING"), return_exceptions=True):
            assert isinstance(answer, exceptions.TimeoutError)


async def test_unsent_bytes_do_not_keep_a_closed_connection_open(tmp_path: Path) -> None:
    is_over = asyncio.Event()

    async def reads_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await is_over.wait()

    async with line_to(tmp_path, reads_nothing) as line:
        call = line.call("ECHO", b"x" * (4 << 20))
        line.close()
        await asyncio.gather(call, return_exceptions=True)
        await asyncio.sleep(0)
        number = line._transport.get_extra_info("socket").fileno()
        is_over.set()
        assert number == -1


@pytest.mark.parametrize("nonsense", [b"?what\r\n", b"+OK\r\n+OK\r\n"])
async def test_invalid_reply_closes_the_connection(tmp_path: Path, nonsense: bytes) -> None:
    async def lying(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1 << 16):
            writer.write(nonsense)

    async with line_to(tmp_path, lying) as line:
        line.call("PING").add_done_callback(lambda answer: answer.exception())
        assert isinstance(await line.lost, exceptions.InvalidResponse)
