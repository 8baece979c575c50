"""Where the ranks of a group meet, and how rank 0 tells the others that there is a message: words in shared memory."""

from __future__ import annotations

from pathlib import Path

from penstock.kernels.cpu.library import open_library
from penstock.kernels.cpu.structs import ExchangeState, RankState


class Exchange:
    """One rank's view of the words. They begin as zeros, and all ranks map the same memory."""

    def __init__(self, library: Path, address: int, rank: int, size: int, *, memory: object) -> None:
        """address: of the `ExchangeState`. size: the number of ranks. memory: what keeps the address mapped."""
        self._memory = memory
        self._library = open_library(library)
        self._state = ExchangeState.from_address(address)
        self.address = address
        self.rank = rank
        self.size = size

    def hand_out(self, number: int) -> None:
        """Tell the other ranks that there is message `number`. They count from 1."""
        self._library.penstock_exchange_hand_out(self.address, number)

    def next_message(self, seen: int, patience_s: float) -> int:
        """Wait for a message after `seen`, for the end of the group, or for some time. Return the last one's number."""
        return int(self._library.penstock_exchange_await(self.address, seen, int(patience_s * 1e9)))

    def meet(self, *, is_refused: bool = False) -> bool:
        """Wait for all ranks, outside a step. Return whether none refused. After an abort it returns at once."""
        return bool(self._library.penstock_exchange_vote(self.address, self.rank, self.size, is_refused))

    def abort(self) -> None:
        """End the group: no rank waits at a meeting from now on. Any rank may call it, and any thread."""
        self._library.penstock_exchange_abort(self.address)

    @property
    def is_aborted(self) -> bool:
        """Whether the group has ended."""
        return bool(self._state.aborted.value)

    def state_of(self, rank: int) -> RankState:
        """Return what a rank shows of itself, as it changes."""
        state: RankState = self._state.ranks[rank]
        return state

    def repeat(self, count: int, rows: int, num_floats: int) -> bool:
        """Exchange rows of numbers `count` times, to measure that: write a part, meet, read all, meet.

        rows: the address of `num_floats` floats that all ranks share.
        """
        call = self._library.penstock_exchange_repeat
        return bool(call(self.address, self.rank, self.size, count, rows, num_floats))
