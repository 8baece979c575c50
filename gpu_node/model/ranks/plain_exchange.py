"""The shared memory of ranks that exchange tensors by torch: messages, and what each rank reports of its progress.

It has the layout of `penstock.kernels.cpu.exchange`, without the kernel library, which not every machine has.
"""

from __future__ import annotations

import ctypes as c
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from penstock.contract.errors import InvariantError
from penstock.gpu_node.model.protocol import RanksLostError
from penstock.gpu_node.model.ranks.control import GroupMemory
from penstock.gpu_node.model.ranks.group import RankGroup
from penstock.kernels.cpu.structs import RankState

_SYS_FUTEX = {"x86_64": 202, "ppc64le": 221, "s390x": 238}.get(platform.machine(), 98)
"""Of the call futex; 98 on all newer architectures, aarch64 among them."""
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_MOST = 2**31 - 1
_LOOK_S = 0.1
"""A waiting rank looks this often whether the group was aborted."""
_DONE_LOOK_S = 0.0002
_DONE_PATIENCE_S = 600.0
_syscall = c.CDLL(None).syscall


class _Time(c.Structure):
    _fields_ = [("seconds", c.c_long), ("nanoseconds", c.c_long)]


def _wait(word: Any, old: int, patience_s: float) -> None:
    """Sleep while a word in shared memory is `old`, for some time at most."""
    whole, rest = divmod(patience_s, 1)
    pause = _Time(int(whole), int(rest * 1e9))
    _syscall(c.c_long(_SYS_FUTEX), c.byref(word), _FUTEX_WAIT, c.c_uint32(old), c.byref(pause), None, 0)


def _wake(word: Any) -> None:
    _syscall(c.c_long(_SYS_FUTEX), c.byref(word), _FUTEX_WAKE, _MOST, None, None, 0)


class PlainExchange:
    """One rank's view of the words. They begin as zeros, and all ranks of a host map the same memory."""

    def __init__(self, memory: GroupMemory, rank: int, readers: Sequence[int] = ()) -> None:
        """readers: the ranks that read messages from this memory, for the rank that writes them there."""
        self._memory = memory
        self._state = memory.state
        self._done = memory.done
        self.rank = rank
        self._readers = readers
        self.forwards: list[Callable[[int], None]] = []
        """Called with the number of each message that is handed out, for ranks on other hosts."""
        self.waiting = ExchangeWait(self._state.ranks[rank], memory)
        """A context in which this rank shows that it waits for others."""
        self.waiting_for_stages = ExchangeWait(self._state.ranks[rank], memory, is_idle=True)
        """The same for what other stages compute. None of this time is an exchange's."""

    @property
    def num_messages(self) -> int:
        """The number of the last message that was handed out."""
        return int(self._state.step.value)

    def hand_out(self, number: int) -> None:
        """Tell the other ranks that there is message `number`. They count from 1."""
        self._state.step.value = number
        _wake(self._state.step)
        for forward in self.forwards:
            forward(number)

    def next_message(self, seen: int, patience_s: float) -> int:
        """Wait for a message after `seen`, for the end of the group, or for some time. Return the last one's number."""
        ends_s = time.monotonic() + patience_s
        while self.num_messages == seen and not self.is_aborted and (left_s := ends_s - time.monotonic()) > 0:
            _wait(self._state.step, seen, min(left_s, _LOOK_S))
        return self.num_messages

    def note_done(self, number: int) -> None:
        """Show that this rank does not read message `number` any more."""
        self._done[self.rank] = number

    def await_done(self) -> None:
        """Wait until all readers have done the last message, so that the next one may be written.

        Raises RanksLostError if the group ends meanwhile.
        """
        begun_s, state = time.monotonic(), self._state.ranks[self.rank]
        try:
            while any(self._done[rank] < self.num_messages for rank in self._readers):
                # The watch looks only at ranks for which all others wait. One may be stopped after the last exchange.
                state.is_waiting = 1
                if self.is_aborted:
                    raise RanksLostError("the ranks were ended")
                if time.monotonic() - begun_s > _DONE_PATIENCE_S:
                    raise InvariantError(f"a rank has not done message {self.num_messages} for {_DONE_PATIENCE_S:g} s")
                time.sleep(_DONE_LOOK_S)
        finally:
            state.is_waiting = 0

    def meet(self, *, is_refused: bool = False) -> bool:
        """Raise InvariantError: these ranks vote by an exchange of tensors."""
        raise InvariantError("ranks without the kernel library do not meet at words")

    def abort(self) -> None:
        """End the group: no rank waits for a message from now on. Any rank may call it, and any thread."""
        self._state.aborted.value = 1
        _wake(self._state.step)

    @property
    def is_aborted(self) -> bool:
        """Whether the group has ended."""
        return bool(self._state.aborted.value)

    def state_of(self, rank: int) -> RankState:
        """Return what a rank shows of itself, as it changes.

        Its `exchanged_ns` are those in which it waited for ranks of its stage too.
        """
        state: RankState = self._state.ranks[rank]
        return state

    def is_idle(self, rank: int) -> bool:
        """Whether a rank waits for others at an exchange, or for a message."""
        is_waiting = bool(self.state_of(rank).is_waiting)
        return is_waiting or (rank > 0 and bool(self._done[rank] >= self.num_messages))

    def progress_of(self, rank: int) -> tuple[int, ...]:
        """Return numbers that change while a rank makes progress; for an idle rank, while its process runs."""
        if self.is_idle(rank):
            return 1, self.pulse_of(rank)
        return 0, int(self.state_of(rank).meetings), int(self._done[rank])

    def pulse_of(self, rank: int) -> int:
        """Return a number that changes as long as a rank's process runs."""
        return int(self._memory.pulses[rank])


class ExchangeWait(AbstractContextManager[None]):
    """Counts the exchanges of a rank and the time that they take, and shows that it waits. One thread uses it."""

    def __init__(self, state: RankState, memory: GroupMemory, *, is_idle: bool = False) -> None:
        """is_idle: whether the time counts as `waited_ns`, not as `exchanged_ns`."""
        self._state = state
        self._is_idle = is_idle
        self._memory = memory  # Keeps the state mapped.
        self._begun_ns = 0

    def __enter__(self) -> None:
        self._state.meetings += 1
        self._begun_ns = time.monotonic_ns()
        self._state.is_waiting = 1

    def __exit__(self, *error: object) -> None:
        self._state.is_waiting = 0
        took_ns = time.monotonic_ns() - self._begun_ns
        if self._is_idle:
            self._state.waited_ns += took_ns
        else:
            self._state.exchanged_ns += took_ns


_PULSE_S = 1.0
"""Without a pulse for so long, a process is stopped. It has four in a second, a little later on a busy machine."""
_MAX_LOOK_S = 0.5


class StoppedRank:
    """Finds a rank that stands still while all others are idle, or stopped too.

    Ranks that are slow together do not hang. Rank 0 is watched as a part of the engine.
    """

    def __init__(self, group: RankGroup[PlainExchange]) -> None:
        self._words = group.exchange
        self._ranks = range(1, group.size)
        self._progress: dict[int, tuple[int, ...]] = {}
        self._pulses: dict[int, int] = {}
        self._still_s = dict.fromkeys(self._ranks, 0.0)
        self._silent_s = dict.fromkeys(self._ranks, 0.0)
        self._looked_s = time.monotonic()
        self.for_s = 0.0

    def look(self) -> int | None:
        """Implement `RankWatch.look`. Time in which this process did not run does not count."""
        now_s, words = time.monotonic(), self._words
        passed_s, self._looked_s = min(now_s - self._looked_s, _MAX_LOOK_S), now_s
        for rank in self._ranks:
            progress, pulse = words.progress_of(rank), words.pulse_of(rank)
            self._still_s[rank] = self._still_s[rank] + passed_s if self._progress.get(rank) == progress else 0.0
            self._silent_s[rank] = self._silent_s[rank] + passed_s if self._pulses.get(rank) == pulse else 0.0
            self._progress[rank], self._pulses[rank] = progress, pulse
        going = [rank for rank in self._ranks if not words.is_idle(rank) and self._silent_s[rank] < _PULSE_S]
        still = [rank for rank in self._ranks if going in ([], [rank]) and self._still_s[rank] >= _PULSE_S]
        if not still or not words.is_idle(0):
            return None
        longest = max(still, key=self._still_s.__getitem__)
        self.for_s = self._still_s[longest]
        return longest
