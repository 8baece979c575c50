"""Whether the caller is still there."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

from starlette.types import Receive


class CallerGoneError(Exception):
    """The other side hung up, or takes nothing any more."""


async def while_connected(receive: Receive, work: Coroutine[None, None, None]) -> None:
    """Runs `work`, and cancels it when the caller hangs up. The request's body must have been read."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_hang_up(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise CallerGoneError
        task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _hang_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
