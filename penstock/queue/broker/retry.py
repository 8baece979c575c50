"""Waiting out an absence of Redis: jittered, growing pauses, and an end to patience."""

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
    """Pauses between attempts: doubling, and jittered so that many clients do not come back at once."""
    ceiling_s = FIRST_PAUSE_S
    while True:
        yield random.uniform(ceiling_s / 2, ceiling_s)
        ceiling_s = min(2 * ceiling_s, LONGEST_PAUSE_S)


async def patiently(call: Callable[[], Awaitable[T]], outage_s: float) -> T:
    """The answer of `call`, repeated while Redis is away, for `outage_s` at most; `call` must be idempotent."""
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
    """For what its caller tries again anyway: an absence of Redis passes, whatever else Redis says is logged."""
    try:
        yield
    except UnavailableError:
        pass
    except PenstockError as error:
        log.error("redis refuses what will be tried again", extra={"code": error.code, "reason": error.message})
