"""The memory claimed for a large WebSocket message. It grows while the message arrives, within a time limit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from penstock.gateway.shared_budget import Claim

Budget = Callable[[], AbstractAsyncContextManager[Claim]]
"""Makes an empty claim for one message."""


class MessageMemory:
    """The memory of one connection's large message, from its first parts until the application has taken it."""

    def __init__(self, resume: Callable[[], None], fail: Callable[[str], None]) -> None:
        """`resume` is called when received bytes may be parsed again, and `fail` when a message does not arrive."""
        self._resume = resume
        self._fail = fail
        self._budget: Budget | None = None
        self._timeout_s = 0.0
        self._task: asyncio.Task[None] | None = None
        self._num_needed = self._num_granted = 0
        self._has_arrived = False
        self._changed = asyncio.Event()
        """Set when the message needs more memory, or has arrived."""
        self._taken = asyncio.Event()

    def set_budget(self, budget: Budget, timeout_s: float) -> None:
        """Set where memory comes from. A message must arrive within `timeout_s`, without its waits for memory."""
        self._budget, self._timeout_s = budget, timeout_s

    @property
    def must_wait(self) -> bool:
        """Whether no more bytes may be parsed: the message waits for memory, or has arrived and is not taken yet."""
        return self._task is not None and (self._num_granted < self._num_needed or self._has_arrived)

    def claim(self, num_bytes: int) -> None:
        """Start waiting for memory if the parts of the message have more bytes than were granted."""
        if self._budget is None or self._has_arrived or num_bytes <= self._num_granted:
            return
        self._num_needed = num_bytes
        self._changed.set()
        if self._task is None:
            self._taken.clear()
            self._task = asyncio.get_running_loop().create_task(self._hold(self._budget))

    def arrived(self) -> None:
        """Note that the message is complete."""
        self._has_arrived = self._task is not None
        self._changed.set()

    def taken(self) -> None:
        """Note that the application no longer needs the message."""
        self._taken.set()

    def close(self) -> None:
        """Give the memory back at the end of the connection."""
        if self._task is not None:
            self._task.cancel()

    async def _hold(self, budget: Budget) -> None:
        async with budget() as claim:
            try:
                await self._arrive(claim)
            except TimeoutError:
                self._fail(f"a message did not arrive within {self._timeout_s:g} s")
            else:
                await self._taken.wait()
        self._task = None
        self._num_needed = self._num_granted = 0
        self._has_arrived = False
        self._resume()

    async def _arrive(self, claim: Claim) -> None:
        """Let the claim grow until the message has arrived. Raises TimeoutError."""
        loop, left_s = asyncio.get_running_loop(), self._timeout_s
        while not self._has_arrived:
            await claim.grow_to(self._num_needed)
            # A claim may have at most what one message may have, so the whole message then has its memory.
            self._num_granted = max(self._num_needed, claim.amount)
            self._changed.clear()
            self._resume()
            began_s = loop.time()
            async with asyncio.timeout(left_s):
                await self._changed.wait()
            left_s -= loop.time() - began_s
