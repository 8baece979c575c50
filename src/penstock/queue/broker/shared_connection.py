"""A Redis connection that many calls share by pipelining. A call does not wait for the answers of earlier calls.

redis-py opens, encrypts and authenticates the connection; hiredis packs and parses. This bypasses redis-py's work per
call: a connection from the pool, locks, a task, two timers, and hooks for retries and metrics. That work costs five
times as much as the call itself, at every engine step.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast
from weakref import WeakSet

import hiredis
from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.sentinel import SentinelConnectionPool

from penstock.queue.broker.redis_clock import RedisClock

REPLY_TIMEOUT_S = 10.0
MAX_BUFFERED_BYTES = 1 << 20
"""Received bytes that are not yet processed; beyond this, the connection stops reading."""
LARGE_ARGUMENT_BYTES = 256 << 10
"""A command with a larger argument is sent in pieces, without a packed copy of it."""
PIECE_BYTES = 128 << 10
MAX_PIECES_PER_ROUND = 4
"""Pieces that are written before the event loop runs other callbacks."""
_UNFINISHED = object()
_RUN_ID = re.compile(rb"^run_id:(\w+)", re.MULTILINE)
_REPLY_ERRORS = {
    "NOSCRIPT": exceptions.NoScriptError,
    "NOPERM": exceptions.NoPermissionError,
    "NOAUTH": exceptions.AuthenticationError,
    "OOM": exceptions.OutOfMemoryError,
}
_REPLICA_CODES = re.compile(r"(?:^|-)(?:READONLY|MASTERDOWN) ")
"""Errors that only a replica returns, at the head of a reply or inside the error of a script in which a call failed."""


class ReplyCallback:
    """Passes a reply or an exception on at once, where waking the task of a future would cost more CPU time."""

    __slots__ = ("set_exception", "set_result")

    def __init__(self, on_reply: Callable[[Any], None]) -> None:
        self.set_result = self.set_exception = on_reply

    def done(self) -> bool:
        """Return False: it cannot be canceled."""
        return False


class SharedConnection(asyncio.Protocol):
    """One connection; its answers arrive in the order of its calls.

    Raises redis-py's errors. A lost connection raises ConnectionError or TimeoutError.
    """

    def __init__(self, writer: asyncio.StreamWriter, on_message: Callable[[bytes, bytes], None] | None) -> None:
        # The writer is kept because its finalizer would close the connection.
        self._writer = writer
        self._transport = cast(asyncio.Transport, writer.transport)
        self._transport.set_protocol(self)
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._reader = hiredis.Reader(
            protocolError=exceptions.InvalidResponse, replyError=_error_of, notEnoughData=_UNFINISHED
        )
        self._waiting: deque[tuple[asyncio.Future[Any] | ReplyCallback, float]] = deque()
        self._clock: asyncio.TimerHandle | None = None
        self._num_buffered = 0
        """Bytes received since the buffer was last empty."""
        self._goes_on = False
        """Whether a callback that continues to process the buffer is scheduled."""
        self._paused = False
        self._unwritten: deque[bytes | memoryview] = deque()
        """Pieces of large commands, and the commands behind them."""
        self._writes_later = False
        """Whether the transport is full, or a callback that continues to write is scheduled."""
        self.address: tuple[str, int] = ("", 0)
        """Host and port to which redis-py connected; of a Unix socket, nothing."""
        self.peer_ip = ip_of(self._transport)
        self.run_id: str | None = None
        """That of the server, once `run_id_of` has asked for it."""
        self.lost: asyncio.Future[Exception] = self._loop.create_future()
        """Done once the connection has failed or was closed; its result is the reason."""

    @classmethod
    async def open(cls, redis: Redis, on_message: Callable[[bytes, bytes], None] | None = None) -> SharedConnection:
        """Connect with the options of `redis`. `on_message` gets the channel and the text of each message."""
        connection = cast(Any, redis.connection_pool).make_connection()
        try:
            await connection.connect()
        except BaseException:
            # A connect that fails or is canceled half way would leave its socket to the garbage collector.
            if connection._writer is not None:
                connection._writer.close()
            raise
        writer = connection._writer
        # Detach the stream from redis-py, so that only this object closes it.
        connection._reader = connection._writer = None
        line = cls(cast(asyncio.StreamWriter, writer), on_message)
        if isinstance(redis, SharedRedis):
            redis.note_opened(line, getattr(connection, "host", ""), getattr(connection, "port", 0))
        return line

    def call(self, *command: Any) -> asyncio.Future[Any]:
        """Send a command and return the future of its answer. Canceling the future does not affect other calls."""
        answer = self._loop.create_future()
        if self.lost.done():
            answer.set_exception(self.lost.result())
        else:
            self.send(answer, command)
        return answer

    def call_all(self, commands: Sequence[Sequence[Any]]) -> list[asyncio.Future[Any]]:
        """Send small commands in one piece and return the futures of their answers."""
        if self.lost.done() or self._unwritten:
            return [self.call(*command) for command in commands]
        answers, now_s = [self._loop.create_future() for _ in commands], self._loop.time()
        self._waiting.extend((answer, now_s) for answer in answers)
        if self._clock is None:
            self._clock = self._loop.call_later(REPLY_TIMEOUT_S, self._check_clock)
        self._transport.write(b"".join([hiredis.pack_command(tuple(command)) for command in commands]))
        return answers

    def send(self, answer: asyncio.Future[Any] | ReplyCallback, command: Sequence[Any]) -> None:
        """Send a command over an open connection. Its reply or error is set in `answer`."""
        self._waiting.append((answer, self._loop.time()))
        if self._clock is None:
            self._clock = self._loop.call_later(REPLY_TIMEOUT_S, self._check_clock)
        if self._unwritten or _is_large(command):
            self._unwritten.extend(_pieces_of(command))
            self._write_on()
        else:
            self._transport.write(hiredis.pack_command(tuple(command)))

    def close(self, reason: Exception | None = None) -> None:
        """Close the connection and drop unsent bytes. Pending calls fail with `reason`."""
        if not self.lost.done():
            self.lost.set_result(reason or exceptions.ConnectionError("the connection was closed"))
        if self._clock is not None:
            self._clock.cancel()
        self._transport.abort()  # Unsent bytes would keep a closed transport open while Redis reads nothing.
        self._unwritten.clear()
        while self._waiting:
            answer, _ = self._waiting.popleft()
            if not answer.done():
                answer.set_exception(self.lost.result())

    def data_received(self, data: bytes) -> None:
        """Process received bytes (asyncio.Protocol)."""
        self._reader.feed(data)
        self._num_buffered += len(data)
        if not self._goes_on:
            self._read_on()
        elif self._num_buffered > MAX_BUFFERED_BYTES and not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def pause_writing(self) -> None:
        """Stop writing, because the transport's buffer is full (asyncio.Protocol)."""
        self._writes_later = True

    def resume_writing(self) -> None:
        """Continue to write (asyncio.Protocol)."""
        self._writes_later = False
        self._write_on()

    def connection_lost(self, exc: Exception | None) -> None:
        """Close after Redis has closed the connection or it broke (asyncio.Protocol)."""
        self.close(exceptions.ConnectionError(str(exc) if exc else "Redis closed the connection"))

    def _read_on(self) -> None:
        self._goes_on = False
        try:
            while (reply := self._reader.gets()) is not _UNFINISHED:
                if self._on_message is None or type(reply) is not list or reply[0] != b"message":
                    self._answer(reply)
                    continue
                self._on_message(reply[1], reply[2])
                # Readers run between two messages; otherwise many messages at once would overflow their queues.
                self._goes_on = True
                self._loop.call_soon(self._read_on)
                return
        except exceptions.RedisError as error:
            self.close(error)
        self._num_buffered = 0
        if self._paused and not self.lost.done():
            self._paused = False
            self._transport.resume_reading()

    def _write_on(self) -> None:
        """Write the next pieces. Large arguments at once would block the event loop for tens of milliseconds."""
        num_written = 0
        while self._unwritten and not self._writes_later:
            self._transport.write(self._unwritten.popleft())
            num_written += 1
            if num_written >= MAX_PIECES_PER_ROUND and self._unwritten and not self._writes_later:
                self._writes_later = True
                self._loop.call_soon(self.resume_writing)

    def _answer(self, reply: Any) -> None:
        if not self._waiting:
            raise exceptions.InvalidResponse("Redis sent a reply without a pending command")
        answer, _ = self._waiting.popleft()
        if not answer.done():
            if isinstance(reply, Exception):
                answer.set_exception(reply)
            else:
                answer.set_result(reply)
        if isinstance(reply, exceptions.ReadOnlyError):
            # A former master became a replica but kept this connection. A new one may reach the new master.
            self.close(reply)

    def _check_clock(self) -> None:
        """Check the oldest call for a time-out. One timer serves all calls; a timer per call would double its cost."""
        self._clock = None
        if not self._waiting:
            return
        left_s = self._waiting[0][1] + REPLY_TIMEOUT_S - self._loop.time()
        if left_s <= 0:
            self.close(exceptions.TimeoutError("Redis does not answer"))
        else:
            self._clock = self._loop.call_later(left_s, self._check_clock)


def ip_of(transport: asyncio.BaseTransport) -> str:
    """Return the IP address of the other end; an empty text for a Unix socket."""
    peer = transport.get_extra_info("peername")
    return str(peer[0]) if isinstance(peer, tuple) else ""


async def run_id_of(line: SharedConnection) -> str:
    """Return the id that the server at the other end has since its start; an empty text if it does not tell.

    A connection that subscribes can ask only before it does. Raises redis-py's errors.
    """
    if line.run_id is None:
        try:
            found = _RUN_ID.search(await line.call("INFO", "server"))
        except exceptions.ResponseError:
            found = None  # The ACL user may not call INFO.
        line.run_id = "" if found is None else found[1].decode()
    return line.run_id


def _is_large(command: Sequence[Any]) -> bool:
    return any(type(one) is bytes and len(one) > LARGE_ARGUMENT_BYTES for one in command)


def _pieces_of(command: Sequence[Any]) -> Iterator[bytes | memoryview]:
    """Yield a command in the Redis protocol. Large arguments come in pieces, and are not copied."""
    if not _is_large(command):
        yield hiredis.pack_command(tuple(command))
        return
    small = [b"*%d\r\n" % len(command)]
    for argument in command:
        data = argument if isinstance(argument, bytes) else str(argument).encode()
        small.append(b"$%d\r\n" % len(data))
        if len(data) > LARGE_ARGUMENT_BYTES:
            yield b"".join(small)
            yield from (memoryview(data)[at : at + PIECE_BYTES] for at in range(0, len(data), PIECE_BYTES))
            small = [b"\r\n"]
        else:
            small.append(data + b"\r\n")
    yield b"".join(small)


def _error_of(text: str) -> exceptions.ResponseError:
    if _REPLICA_CODES.search(text):
        return exceptions.ReadOnlyError(text)
    kind = _REPLY_ERRORS.get(text.partition(" ")[0], exceptions.ResponseError)
    return cast(exceptions.ResponseError, kind(text))


class SharedRedis(Redis):
    """redis-py's client with its commands sent over one shared connection.

    Pipelines and subscriptions of redis-py still use connections of their own.
    """

    has_pool: Callable[[str], bool] | None = None
    """Whether a pool belongs to this Redis, where others have their own; None: all pools that it lists."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._line: SharedConnection | None = None
        self._opening = asyncio.Lock()
        self._num_failures = 0
        self._failure: Exception | None = None
        """The error of the last failed attempt to connect."""
        self._is_closing = False
        self.clock = RedisClock()
        """Redis's clock, which `HistoryWatch` reads."""
        self._lines: WeakSet[SharedConnection] = WeakSet()
        """All open connections, also those for subscriptions and for calls that wait for the disk."""
        self.changed = asyncio.Event()
        """Set whenever a connection was opened or lost: the server may be another one."""

    def note_opened(self, line: SharedConnection, host: str, port: int) -> None:
        """Keep a connection among those that `close_lines` closes."""
        line.address = host, port
        self._lines.add(line)
        line.lost.add_done_callback(lambda _: self.changed.set())
        self.changed.set()

    @property
    def line(self) -> SharedConnection | None:
        """The connection of the calls that share one, if it was opened."""
        return self._line

    @property
    def lines(self) -> list[SharedConnection]:
        """The open connections."""
        return [line for line in self._lines if not line.lost.done()]

    async def close_lines(self, reason: Exception, *, except_to: tuple[str, int] | None = None) -> None:
        """Close all connections, or those to other addresses. Their callers connect anew, perhaps to another server."""
        for line in self.lines:
            if line.address != except_to:
                line.close(reason)
        await self.connection_pool.disconnect(inuse_connections=False)

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        """Send one command and return its answer."""
        line = self._line
        if line is None or line.lost.done():
            line = await self._open_line()
        name, *rest = args
        # Some command names of redis-py have two words ("CLIENT LIST").
        reply = await line.call(*name.split(), *rest)
        options.pop("keys", None)
        translate = self.response_callbacks.get(name)
        return reply if translate is None else translate(reply, **options)

    async def execute_all(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """Send small commands together and return their replies as Redis sent them, error replies included."""
        line = self._line
        if line is None or line.lost.done():
            line = await self._open_line()
        replies = await asyncio.gather(*line.call_all(commands), return_exceptions=True)
        for reply in replies:
            if isinstance(reply, BaseException) and not isinstance(reply, exceptions.ResponseError):
                raise reply
        return replies

    def send_now(self, on_reply: Callable[[Any], None], *command: Any) -> bool:
        """Send a command if the connection is open; return whether it was sent.

        `on_reply` gets the reply or an exception. It must not raise.
        """
        if self._line is None or self._line.lost.done():
            return False
        self._line.send(ReplyCallback(on_reply), command)
        return True

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        """Close all connections. A connection that is still being opened is closed as soon as it is open."""
        self._is_closing = True
        if self._line is not None:
            self._line.close()
        await super().aclose(close_connection_pool)
        if isinstance(pool := self.connection_pool, SentinelConnectionPool):
            await pool.disconnect()
            await pool.sentinel_manager.aclose()

    async def identified_line(self) -> tuple[SharedConnection, str]:
        """Return the shared connection, and the run id of its server."""
        line = self._line
        if line is None or line.lost.done():
            line = await self._open_line()
        return line, await run_id_of(line)

    async def _open_line(self) -> SharedConnection:
        """Return the open connection, connecting first if needed.

        Calls that waited while another call failed to connect fail as well. If each retried in turn, the last would
        learn of the failure minutes later.
        """
        num_failures = self._num_failures
        async with self._opening:
            if self._line is not None and not self._line.lost.done():
                return self._line
            if self._failure is not None and self._num_failures > num_failures:
                raise self._failure
            try:
                self._line = await SharedConnection.open(self)
            except (exceptions.RedisError, OSError) as error:
                self._num_failures, self._failure = num_failures + 1, error
                raise
            if self._is_closing:
                self._line.close()
            return self._line


def clock_of(redis: Redis) -> RedisClock:
    """Return the clock of a Redis. That of another client than ours is this machine's."""
    return redis.clock if isinstance(redis, SharedRedis) else RedisClock()
