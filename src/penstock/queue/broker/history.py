"""A process notices that Redis has another history than before, and compares what it knows.

A history is what one server has written since it started, or since it became the primary. A restart, a fail-over, a
restore from a backup and `REPLICAOF` each begin a new one, which may lack the last writes of the old one. It is told by
two ids of INFO. The server's own `run_id` changes when it starts; `master_replid` changes when another server or none
is its primary.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import math
import re
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, NamedTuple, cast

from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.sentinel import SentinelConnectionPool

from penstock.contract.errors import ConfigError, PenstockError, UnavailableError
from penstock.queue.broker.connection import translated
from penstock.queue.broker.shared_connection import SharedConnection, SharedRedis

LOOK_S = 1.0
"""Seconds between two looks. A connection that was opened anew is looked at at once."""
RETRY_S = 0.2
"""Seconds after which a comparison is repeated that Redis interrupted, and a question that no Sentinel answered."""
SETTLE_S = 3.0
"""Seconds after a change was compared in which nodes take no jobs: time for every process to give what it has."""
MAX_RECENT_CALLS = 10_000
"""Cancellations and deletions that a process repeats after a change."""
_READ = (("INFO", "server"), ("INFO", "replication"))
_FIELDS_READ = re.compile(r"^(run_id|master_replid|role):(.*?)\r?$", re.MULTILINE)
_TIME = re.compile(rb"^server_time_usec:(\d+)", re.MULTILINE)
_LOG = logging.getLogger(__package__)


class History(NamedTuple):
    """What identifies a history of Redis."""

    run_id: str
    replication_id: str

    def __str__(self) -> str:
        return f"{self.replication_id} {self.run_id}"


class RecentCalls:
    """Calls that Redis has answered in the last `keep_s` seconds, at most `MAX_RECENT_CALLS`. Each may be repeated."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._calls: deque[tuple[float, Callable[[], Awaitable[object]]]] = deque(maxlen=MAX_RECENT_CALLS)

    def note(self, call: Callable[[], Awaitable[object]]) -> None:
        """Keep a call that was answered."""
        now_s = asyncio.get_running_loop().time()
        self._drop_old(now_s)
        self._calls.append((now_s, call))

    async def repeat(self) -> int:
        """Repeat the calls in their order, and return their number. Refusals are ignored. Raises UnavailableError."""
        self._drop_old(asyncio.get_running_loop().time())
        calls = [call for _, call in self._calls]
        for call in calls:
            try:
                await call()
            except UnavailableError:
                raise
            except PenstockError:
                pass  # What it was about has ended, or is gone.
        return len(calls)

    def _drop_old(self, now_s: float) -> None:
        while self._calls and now_s - self._calls[0][0] > self._keep_s:
            self._calls.popleft()


class HistoryWatch:
    """Looks at the server of one client's connections until canceled.

    Connections to a server that is no primary any more are closed, also while it still answers. That is one that
    became a replica, or one to which Sentinel, or the DNS name of a managed service, does not lead any more.
    """

    def __init__(self, redis: Redis, compare: Callable[[], Awaitable[None]], *, name: str) -> None:
        """`compare` is called after each change, and again after an UnavailableError. `name`: of the process."""
        self._redis = redis
        self._compare = compare
        self._name = name
        self._known: History | None = None
        self._is_compared = self._is_address_known = True
        self._is_readable = True
        self._was_replica = False
        self._same_server = frozenset[str]()
        """Addresses of the DNS name behind which the known server was found, although it has another address."""
        self._changed_s = -math.inf
        """Loop time of the last change, or of the end of its comparison."""
        self._seen: SharedConnection | None = None
        """The connection whose server's history was compared last."""

    async def run(self) -> None:
        """Look every `LOOK_S`, and whenever a connection was opened or lost."""
        if not isinstance(redis := self._redis, SharedRedis):
            return
        while True:
            redis.changed.clear()
            try:
                await self._look(redis)
            except UnavailableError:
                pass  # The calls that need Redis report it.
            except PenstockError as error:
                _LOG.error("redis's history cannot be compared", extra={"client": self._name, "reason": error.reason})
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S if self._is_compared and self._is_address_known else RETRY_S):
                    await redis.changed.wait()

    async def _look(self, redis: SharedRedis) -> None:
        try:
            await self._leave_old_address(redis)
            self._is_address_known = True
        except (UnavailableError, OSError):
            self._is_address_known = False  # Sentinels that do not answer say nothing of the server.
        if (found := await self._read(redis)) is None:
            return
        line = redis.line
        history, is_replica = found
        if is_replica:
            if not self._was_replica:
                _LOG.warning("redis is a replica now", extra={"client": self._name, "history": str(history)})
            self._was_replica = True
            await redis.close_lines(exceptions.ReadOnlyError("Redis became a replica"))
            return
        self._was_replica = False
        if self._known is not None and history != self._known:
            self._is_compared, self._changed_s = False, asyncio.get_running_loop().time()
            ids = {"old": str(self._known), "new": str(history)}
            _LOG.warning("redis has a new history", extra={"client": self._name, **ids})
        self._known = history
        if not self._is_compared:
            try:
                await self._compare()
            except UnavailableError:
                raise
            except PenstockError:
                self._is_compared = True  # Another attempt would fail in the same way.
                raise
            # From now on: where comparing takes long, it takes other processes long too.
            self._is_compared, self._changed_s = True, asyncio.get_running_loop().time()
        self._seen = line

    @property
    def is_compared(self) -> bool:
        """Whether what is known was compared with the server of the present connection, if its history is new."""
        if not isinstance(redis := self._redis, SharedRedis) or not self._is_readable:
            return True
        line = redis.line
        return line is not None and line is self._seen and not line.lost.done()

    @property
    def is_settled(self) -> bool:
        """Whether, besides, the other processes have had time to give Redis what it lacks."""
        return self.is_compared and asyncio.get_running_loop().time() - self._changed_s >= SETTLE_S

    async def _read(self, redis: SharedRedis) -> tuple[History, bool] | None:
        """Return the server's history, and whether it is a replica; None if it does not tell."""
        if not self._is_readable:
            return None
        try:
            with translated():
                sent_s = time.time()
                replies = await redis.execute_all(_READ)
                received_s = time.time()
        except ConfigError as error:
            self._is_readable = False
            _LOG.info("redis's history cannot be read", extra={"client": self._name, "reason": error.reason})
            return None
        with translated():
            found = _history_of(replies)
        if time_us := _TIME.search(replies[0]):
            redis.clock.note(int(time_us[1]), sent_s, received_s)
        return found

    # Addresses --------------------------------------------------------------------------------------

    async def _leave_old_address(self, redis: SharedRedis) -> None:
        """Close connections to a server that the address of this client does not lead to any more."""
        lines = redis.lines
        if isinstance(pool := redis.connection_pool, SentinelConnectionPool):
            with translated():
                address = await cast(Any, pool).get_master_address()
            if any(line.address != address for line in lines):
                reason = exceptions.ConnectionError(f"Sentinel names another primary: {address[0]}:{address[1]}")
                await redis.close_lines(reason, except_to=address)
            return
        host, port = pool.connection_kwargs.get("host"), pool.connection_kwargs.get("port")
        old = {line.peer_ip for line in lines if line.peer_ip}
        if not host or not old or _is_ip(host):
            return
        now = await _addresses_of(str(host), int(port or 0))
        if old <= now or now == self._same_server or self._known is None:
            return
        with translated():
            line = await SharedConnection.open(redis)
            try:
                history, is_replica = _history_of(await asyncio.gather(*line.call_all(_READ)))
            finally:
                line.close()
        if is_replica or history.run_id == self._known.run_id:
            self._same_server = now  # A proxy, or a name with several addresses.
        else:
            await redis.close_lines(exceptions.ConnectionError(f"{host} leads to another server now"))


def _history_of(replies: list[Any]) -> tuple[History, bool]:
    """Return the history that the answers to `_READ` tell, and whether the server is a replica."""
    found: dict[str, str] = {}
    for reply in replies:
        if isinstance(reply, exceptions.ResponseError):
            raise reply
        found |= _FIELDS_READ.findall(reply.decode(errors="replace"))
    return History(found.get("run_id", ""), found.get("master_replid", "")), found.get("role") == "slave"


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


async def _addresses_of(host: str, port: int) -> frozenset[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return frozenset(str(address[0]) for *_, address in found)
