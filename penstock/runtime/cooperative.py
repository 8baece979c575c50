"""Cooperative scheduling of work that takes milliseconds: one piece per round of the event loop."""

from __future__ import annotations

import asyncio
from collections import deque


class CooperativeTurns:
    """Wakes one waiter per round of the event loop, in order, so that many ready pieces do not block it together."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_serving = False

    async def wait(self) -> None:
        """Wait until the caller may work for a few milliseconds."""
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        self._waiting.append(turn)
        if not self._is_serving:
            self._is_serving = True
            loop.call_soon(self._serve)
        await turn

    def _serve(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # its caller may have been canceled
                turn.set_result(None)
                break
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._serve)
        else:
            self._is_serving = False
