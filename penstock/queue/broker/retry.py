"""Retries while Redis is unreachable: jittered, growing pauses and a limit on the total time."""

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

T = TypeVar("T")


def pauses() -> Iterator[float]:
    """Yield pauses between attempts, in seconds: doubling, and jittered so that many clients do not retry at once."""
    ceiling_s = FIRST_PAUSE_S
    while True:
        yield random.uniform(ceiling_s / 2, ceiling_s)
        ceiling_s = min(2 * ceiling_s, LONGEST_PAUSE_S)


async def patiently(call: Callable[[], Awaitable[T]], outage_s: float) -> T:
    """Return the answer of `call`, retried for up to `outage_s` seconds while Redis is unreachable.

    `call` must be idempotent. Raises UnavailableError after that time.
    """
    clock = asyncio.get_running_loop().time
    give_up_s = clock() + outage_s
    patience = pauses()
    while True:
        try:
            return await call()
        except UnavailableError:
            pause_s = next(patience)
            if clock() + pause_s > give_up_s:
                raise
        await asyncio.sleep(pause_s)


@contextmanager
def tried_again(log: logging.Logger) -> Iterator[None]:
    """Suppress errors of a call that its caller repeats later anyway.

    An unreachable Redis is ignored; any other error of Redis is logged.
    """
    try:
        yield
    except UnavailableError:
        pass
    except PenstockError as error:
        log.error("redis refused a call that will be retried", extra={"code": error.code, "reason": error.message})
