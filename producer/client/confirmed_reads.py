"""Readers that show a token only once Redis's disk, or a replica, has it: `token_durability`.

The wait is the reader's. A node's emission appends to the log and publishes in one step, for all readers alike. So a
reader that asks for more holds what has arrived until a round that began after that is confirmed (`DurableCalls`). All
readers of a process share the rounds of a server. A reader that does not ask pays nothing.

What a server confirms is only what it has itself. So each message and each answer is marked with the server that it
came from. After a lost connection or a new history, what is held is dropped, and the log is read again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from redis.asyncio import Redis

from penstock.contract.durability import FSYNC, TOKEN_DURABILITY, Durability, checked_durability
from penstock.contract.errors import (
    NotConfirmedError,
    NotOnDiskError,
    NotReplicatedError,
    PenstockError,
    UnavailableError,
    UnsupportedDurabilityError,
)
from penstock.contract.problems import rename
from penstock.producer.client.inbox import ClientInbox
from penstock.producer.client.mailbox import MessageOrigin
from penstock.queue.broker.connection import Patience, pauses, translated
from penstock.queue.broker.durable_calls import Confirmed, DurableCalls
from penstock.queue.broker.shared_connection import SharedConnection, SharedRedis

Found = TypeVar("Found")
_HEARTBEAT = "reader_heartbeat"
"""The small write of a round: the heartbeat of this process as a reader, which always writes."""


class ConfirmedReads:
    """Lets the readers of one server wait until what they have read is as safe as one durability asks."""

    def __init__(
        self, redis: Redis, patience: Patience | None, inbox: ClientInbox, durability: Durability, outage_s: float
    ) -> None:
        """`outage_s`: seconds for which a reader waits for a confirmation."""
        self._redis = redis
        self._inbox = inbox
        self._durability = durability
        self._outage_s = outage_s
        self._calls = DurableCalls(redis, patience, durability, names_server=True)

    async def check(self) -> None:
        """Raise UnsupportedDurabilityError or NotReplicatedError if no token could be confirmed now."""
        try:
            await self._calls.check()
        except PenstockError as error:
            rename(error, {"durability": TOKEN_DURABILITY})
            if isinstance(error, NotConfirmedError):
                error.message = f"{TOKEN_DURABILITY}: no replica is connected to Redis; a repeated call may find one"
            error.args = (error.message,)
            raise

    async def close(self) -> None:
        """Close the connections. Readers that wait get UnavailableError."""
        await self._calls.close()

    async def hold(self, pool: str, mark: MessageOrigin) -> bool:
        """Wait until what came with this mark before the call is confirmed.

        Return False if another server confirms, or if a connection was lost or a new history begun meanwhile: then the
        log is to be read again. Raises NotOnDiskError or NotReplicatedError after `outage_s`, and UnavailableError if
        Redis stays unreachable.
        """
        confirmed = await self._confirmed(pool, lambda: self._inbox.mark[1:] == mark[1:])
        return confirmed is not None and confirmed.run_id == mark.run_id and self._inbox.mark[1:] == mark[1:]

    async def read(self, pool: str, read: Callable[[], Awaitable[Found]]) -> Found:
        """Return what `read` finds in Redis, once it is confirmed. Nothing found needs no confirmation."""
        end_s = asyncio.get_running_loop().time() + self._outage_s
        waits = pauses()
        while True:
            mark, line = self._inbox.mark, await self._line()
            if not (found := await read()):
                return found
            is_one_line = line is not None and line.run_id and self._line_now() is line
            if line is not None and is_one_line and await self.hold(pool, mark._replace(run_id=line.run_id or "")):
                return found
            if asyncio.get_running_loop().time() > end_s:
                raise self._not_confirmed()
            await asyncio.sleep(next(waits))

    async def _confirmed(self, pool: str, is_wanted: Callable[[], bool]) -> Confirmed | None:
        """Return the answer of the first round that is confirmed; None once it is not wanted any more."""
        waits = pauses()
        try:
            async with asyncio.timeout(self._outage_s) as limit:
                while is_wanted():
                    try:
                        found = await self._calls.confirm(_HEARTBEAT, pool, (self._inbox.name,))
                        if found.is_confirmed:
                            return found
                    except UnavailableError as error:
                        # Redis itself has been away for as long as calls are repeated.
                        if not isinstance(error, NotConfirmedError):
                            raise
                    except PenstockError:
                        pass  # Its settings have changed, or its memory is full. Both may end.
                    await asyncio.sleep(next(waits))
        except TimeoutError:
            if not limit.expired():
                raise
            raise self._not_confirmed() from None
        return None

    async def _line(self) -> SharedConnection | None:
        """Return the connection over which answers come, with its server's run id."""
        if not isinstance(redis := self._redis, SharedRedis):
            message = f"{TOKEN_DURABILITY}: this connection does not tell its server"
            raise UnsupportedDurabilityError(message, param=TOKEN_DURABILITY)
        try:
            with translated():
                return (await redis.identified_line())[0]
        except UnavailableError:
            return None  # The read waits for Redis.

    def _line_now(self) -> SharedConnection | None:
        return self._redis.line if isinstance(self._redis, SharedRedis) else None

    def _not_confirmed(self) -> NotConfirmedError:
        missing = "its disk has" if self._durability == FSYNC else "a replica has"
        message = (
            f"{TOKEN_DURABILITY}: Redis did not confirm within {self._outage_s:g} s that {missing} the next tokens; a "
            "reader of the job goes on after the last token that it has"
        )
        return (NotOnDiskError if self._durability == FSYNC else NotReplicatedError)(message)


class ReadDurabilities:
    """The `ConfirmedReads` of one server, by durability."""

    def __init__(self, redis: Redis, patience: Patience | None, inbox: ClientInbox, outage_s: float) -> None:
        self._parts = redis, patience, inbox
        self._outage_s = outage_s
        self._of: dict[Durability, ConfirmedReads] = {}

    def of(self, durability: Durability) -> ConfirmedReads:
        """Return what readers wait for. Raises RequestError for an unknown durability."""
        if (found := self._of.get(durability)) is None:
            checked_durability(durability, TOKEN_DURABILITY)
            found = self._of[durability] = ConfirmedReads(*self._parts, durability, self._outage_s)
        return found

    async def close(self) -> None:
        """Close all connections."""
        for one in self._of.values():
            await one.close()
