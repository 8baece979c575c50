"""Memory of large messages of WebSockets: a message waits for it, then must arrive in time, and gives it back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

Budget = Callable[[], AbstractAsyncContextManager[None]]
"""Waits for the memory of a message of any allowed size, and holds it in the block."""


class MessageMemory:
    """The memory of one connection's large message, from its first part until the application has taken it."""

    def __init__(self, go_on: Callable[[], None], fail: Callable[[str], None]) -> None:
        """`go_on` is called when received bytes may be parsed again, and `fail` when a message does not arrive."""
        self._go_on = go_on
        self._fail = fail
        self._budget: Budget | None = None
        self._timeout_s = 0.0
        self._task: asyncio.Task[None] | None = None
        self._is_granted = False
        self._arrived = asyncio.Event()
        self._taken = asyncio.Event()

    def set_budget(self, budget: Budget, timeout_s: float) -> None:
        """Set where memory comes from. A message must arrive within `timeout_s` after it got memory."""
        self._budget, self._timeout_s = budget, timeout_s

    @property
    def must_wait(self) -> bool:
        """Whether no more bytes may be parsed: the message waits for memory, or has arrived and is not taken yet."""
        return self._task is not None and (not self._is_granted or self._arrived.is_set())

    def claim(self) -> None:
        """Begin to wait for memory, unless this message has done so, or the application set no budget."""
        if self._task is None and self._budget is not None:
            self._is_granted = False
            self._arrived.clear()
            self._taken.clear()
            self._task = asyncio.get_running_loop().create_task(self._hold(self._budget))

    def arrived(self) -> None:
        """Note that the message is complete."""
        self._arrived.set()

    def taken(self) -> None:
        """Note that the application no longer needs the message."""
        self._taken.set()

    def close(self) -> None:
        """Give the memory back at the end of the connection."""
        if self._task is not None:
            self._task.cancel()

    async def _hold(self, budget: Budget) -> None:
        async with budget():
            self._is_granted = True
            self._go_on()
            try:
                async with asyncio.timeout(self._timeout_s):
                    await self._arrived.wait()
            except TimeoutError:
                self._fail(f"a message did not arrive within {self._timeout_s:g} s")
            else:
                await self._taken.wait()
        self._task = None
        self._go_on()
