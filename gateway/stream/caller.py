"""Whether the caller is still there."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

from starlette.types import Receive


class CallerGoneError(Exception):
    """The other side hung up, or takes nothing any more."""


async def while_there(work: Coroutine[None, None, None], *watches: Coroutine[None, None, None]) -> None:
    """Runs `work`; cancels it and raises CallerGoneError when a watch ends, which it does when the caller is gone."""
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


async def hang_up(receive: Receive) -> None:
    """A watch on the connection. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
