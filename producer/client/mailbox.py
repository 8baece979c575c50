"""Where chunks wait between the inbox and their readers."""

from __future__ import annotations

import asyncio
from collections import deque

from penstock.contract.broker.producer import Attached
from penstock.contract.job import TERMINAL_STATES, Chunk

POLL_S = 0.2
"""How often a reader looks when the job pushes to as many processes as it may."""


class Mailbox:
    """What has arrived for one reader and was not read yet: bounded, the newest kept.

    What falls out of a full box shows as a gap when the reader goes on, and comes from the log.
    """

    __slots__ = ("_bell", "_chunks", "nudged", "waiting_since_s")

    def __init__(self, max_chunks: int) -> None:
        self._chunks: deque[Chunk] = deque(maxlen=max_chunks)
        self._bell = asyncio.Event()
        self.nudged = False
        """Whether the reader has yet to compare its state with the broker's."""
        self.waiting_since_s: float | None = None
        """Loop time since when the reader waits for something; None while it does not."""

    def put(self, chunk: Chunk) -> None:
        """Leaves a chunk for the reader."""
        self._chunks.append(chunk)
        self._bell.set()

    def nudge(self) -> None:
        """Makes the reader compare its state with the broker's."""
        self.nudged = True
        self._bell.set()

    def take_nudge(self) -> bool:
        """Whether the reader was nudged since it last asked."""
        nudged, self.nudged = self.nudged, False
        return nudged

    def take_all(self) -> list[Chunk]:
        """Everything that waits, oldest first."""
        taken = list(self._chunks)
        self._chunks.clear()
        return taken

    async def wait(self, timeout_s: float | None = None) -> None:
        """Returns when there is a chunk or a nudge, or when the time is up."""
        if self._chunks or self.nudged:
            return
        self._bell.clear()
        self.waiting_since_s = asyncio.get_running_loop().time()
        try:
            if timeout_s is None:
                await self._bell.wait()
            else:
                await self._wait_for(timeout_s)
        finally:
            self.waiting_since_s = None

    async def _wait_for(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._bell.wait()
        except TimeoutError:
            self.nudged = True


class Feed:
    """The mailboxes of one job in this process; the inbox knows it only as long as somebody else holds it."""

    __slots__ = ("__weakref__", "boxes", "ended", "job_id", "poll_s")

    def __init__(self, job_id: str) -> None:
        self.job_id = job_id
        self.boxes: list[Mailbox] = []
        self.ended = False
        """Whether the job is known to have ended."""
        self.poll_s: float | None = None
        """How often readers look unasked, where the job does not push to this process."""

    def note(self, standing: Attached) -> None:
        """Takes in the broker's answer, and wakes readers who would wait in vain."""
        has_ended = standing.state in TERMINAL_STATES and not self.ended
        if has_ended or (not standing.pushed and self.poll_s is None):
            for box in self.boxes:
                box.nudge()
        self.ended = self.ended or has_ended
        self.poll_s = None if standing.pushed else POLL_S

    def put(self, chunk: Chunk) -> None:
        """Leaves a chunk for every reader of the job."""
        if chunk.outcome is not None:
            self.ended = True
        for box in self.boxes:
            box.put(chunk)
