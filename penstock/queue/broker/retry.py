"""Retries while Redis is unreachable: jittered, growing pauses, a limit on the total time and on concurrent calls."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from penstock.contract.errors import PenstockError, UnavailableError

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0
MAX_CALLS = 64
"""Concurrent calls of one client: after an outage, all streams call at once."""

T = TypeVar("T")


def pauses() -> Iterator[float]:
    """Yield pauses between attempts, in seconds: doubling, and jittered so that many clients do not retry at once."""
    ceiling_s = FIRST_PAUSE_S
    while True:
        yield random.uniform(ceiling_s / 2, ceiling_s)
        ceiling_s = min(2 * ceiling_s, LONGEST_PAUSE_S)


class Retries:
    """Retry a client's calls while Redis is unreachable, and bound their number.

    `outage_s` is how long a call is retried. The client sets `is_open` while it is connected.
    """

    def __init__(self, outage_s: float) -> None:
        self._outage_s = outage_s
        self._slots = asyncio.Semaphore(MAX_CALLS)
        self.is_open = False

    async def call(self, request: Callable[[], Awaitable[T]]) -> T:
        """Return the answer of an idempotent request.

        Raises UnavailableError if Redis stays away for `outage_s`, or if the client is closed.
        """
        return await with_retries(request, self._outage_s, self)

    async def take_slot(self, give_up_s: float) -> None:
        """Wait until fewer than MAX_CALLS calls run.

        Raises UnavailableError at `give_up_s`, and at once if the client is closed.
        """
        self.require_open()
        if not self._slots.locked():
            await self._slots.acquire()  # a slot is free, so this does not wait
            return
        try:
            async with asyncio.timeout_at(give_up_s):
                await self._slots.acquire()
        except TimeoutError:
            raise UnavailableError(f"Redis is unreachable: {MAX_CALLS} calls wait for it", code="redis_away") from None

    def free_slot(self) -> None:
        """End a call that `take_slot` began."""
        self._slots.release()

    def require_open(self) -> None:
        """Raise UnavailableError unless the client is connected."""
        if not self.is_open:
            raise UnavailableError("the client is not connected: use `with` or connect()", code="client_closed")


async def with_retries(call: Callable[[], Awaitable[T]], outage_s: float, bound: Retries | None = None) -> T:
    """Return the answer of `call`, retried for up to `outage_s` seconds while Redis is unreachable.

    `call` must be idempotent. `bound` limits how many calls run at once. Raises UnavailableError after that time.
    """
    clock = asyncio.get_running_loop().time
    give_up_s = clock() + outage_s
    patience = pauses()
    while True:
        if bound is not None:
            await bound.take_slot(give_up_s)
        try:
            return await call()
        except UnavailableError:
            pause_s = next(patience)
            if clock() + pause_s > give_up_s:
                raise
        finally:
            if bound is not None:
                bound.free_slot()
        await asyncio.sleep(pause_s)


@contextmanager
def ignoring_retried_errors(log: logging.Logger) -> Iterator[None]:
    """Suppress errors of Redis in a call that will be repeated later anyway.

    An unreachable Redis is ignored; any other error of Redis is logged.
    """
    try:
        yield
    except UnavailableError:
        pass
    except PenstockError as error:
        log.error("redis refused a call that will be retried", extra={"code": error.code, "reason": error.message})
