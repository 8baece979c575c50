"""Detection of callers that disconnect."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

from starlette.types import Receive


class CallerGoneError(Exception):
    """The caller disconnected, or stopped reading its answer."""


async def while_connected(work: Coroutine[None, None, None], *watches: Coroutine[None, None, None]) -> None:
    """Run `work` until it ends or the caller disconnects.

    Each watch ends when the caller is gone. If a watch ends first, `work` is canceled and CallerGoneError raised.
    """
    working = asyncio.ensure_future(work)
    watching = [asyncio.ensure_future(watch) for watch in watches]
    try:
        await asyncio.wait((working, *watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise CallerGoneError
        working.result()
    finally:
        for task in (working, *watching):
            task.cancel()
        await asyncio.gather(working, *watching, return_exceptions=True)


async def until_disconnected(receive: Receive) -> None:
    """Return when the caller disconnects. The request's body must have been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass
