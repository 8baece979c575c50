"""Who of the waiting sequences starts next, and who of the running ones gives way: where policies plug in."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from penstock.gpu_node.engine.sequence import Sequence


class SchedulingPolicy(Protocol):
    """The order in which a scheduler serves."""

    def added(self, seq: Sequence) -> None:
        """A sequence is about to be queued."""

    def ended(self, seq: Sequence, num_output_tokens: int) -> None:
        """A sequence came to its own end."""

    def offer(self, waiting: Iterable[Sequence], start: Callable[[Sequence], bool]) -> None:
        """Call `start` for those that wait, in their turn, until it answers that there is no room.

        Behind one that has no room others may be offered still. Swapped sequences come first in `waiting`, then those
        that lost their blocks, then new ones in the order in which they came.
        """

    def pressing(self, waiting: Iterable[Sequence], running: list[Sequence]) -> tuple[Sequence, list[Sequence]] | None:
        """One that does not wait for room, and who gives way to it, in order; None where everybody waits."""

    def victim(self, running: list[Sequence]) -> Sequence:
        """Who gives its blocks to another running sequence that finds none, which may be itself."""


class FirstComeFirstServed:
    """Nobody overtakes; the one that was admitted last gives way."""

    def added(self, seq: Sequence) -> None:
        """Its place is behind all others."""

    def ended(self, seq: Sequence, num_output_tokens: int) -> None:
        """How long it became is not asked here."""

    def offer(self, waiting: Iterable[Sequence], start: Callable[[Sequence], bool]) -> None:
        """In the order in which they wait, up to the first one without room."""
        for seq in waiting:
            if not start(seq):
                return

    def pressing(self, waiting: Iterable[Sequence], running: list[Sequence]) -> None:
        """Nobody is."""

    def victim(self, running: list[Sequence]) -> Sequence:
        """The last one."""
        return running[-1]
