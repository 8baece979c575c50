"""Rank 0's side of a group: it starts the ranks, hands them messages, and ends all of them when one is lost."""

from __future__ import annotations

import json
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

from penstock.contract.adapters import AdapterRef
from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.protocol import RankBytes, RanksLostError, RankStats, StepPlan, TokenMasks
from penstock.gpu_node.model.ranks.control import GroupMemory
from penstock.gpu_node.model.ranks.messages import Kind, write_adapter, write_masks, write_step
from penstock.kernels.cpu.structs import RankState

log = logging.getLogger(__package__)

START_PATIENCE_S = 120.0
"""How long the ranks may take to load the model. On a busy machine, Python alone takes seconds."""
_LOOK_S = 0.25
"""Interval at which rank 0 shows that it lives, and looks for ranks that hang."""
_MAX_REPORT_BYTES = 64 << 10
_ENDED = "the ranks were ended"


class RankHandle(Protocol):
    """A rank that was started. It reports in lines of JSON: `{"ready": facts, "pid": number}` or `{"error": text}`.

    With the first of them or later it reports what it holds: `"weight_bytes"` and `"kv_bytes"`.
    """

    def fileno(self) -> int:
        """The descriptor to read its reports from. It is closed when the rank has ended."""

    def is_stopped(self) -> bool:
        """Whether a signal has stopped the rank, so that it does not run."""

    def kill(self) -> None:
        """End the rank now, whatever it does. Calls after the first do nothing."""

    def close(self) -> None:
        """Wait until it has ended, and release what belongs to it."""


StartRank = Callable[[int, GroupMemory], RankHandle]
"""Starts the rank with a number, in the memory of its group. Raises OSError."""


class GroupWords(Protocol):
    """Rank 0's view of the words of its group: `Exchange`, or `PlainExchange` without the kernel library."""

    @property
    def is_aborted(self) -> bool:
        """Whether the group has ended."""

    def hand_out(self, number: int) -> None:
        """Tell the other ranks that there is message `number`. They count from 1."""

    def meet(self, *, is_refused: bool = False) -> bool:
        """Wait for all ranks, outside a step. Return whether none refused. After an abort it returns at once."""

    def abort(self) -> None:
        """End the group: no rank waits for a message or at a meeting from now on."""

    def state_of(self, rank: int) -> RankState:
        """Return what a rank shows of itself, as it changes."""


class RankWatch(Protocol):
    """Finds a rank that hangs."""

    for_s: float
    """How long it has stood still."""

    def look(self) -> int | None:
        """Return the rank, if there is one, and measure its time. It is called a few times a second."""


Words = TypeVar("Words", bound=GroupWords)


@dataclass(slots=True)
class _StartedRank:
    handle: RankHandle
    report: bytearray = field(default_factory=bytearray)
    facts: Mapping[str, Any] | None = None
    pid: int = 0
    weight_bytes: int = 0
    kv_bytes: int = 0
    stopped_since_s: float | None = None
    """Since when it was found stopped while it starts, on the monotonic clock."""

    def stopped_s(self) -> float:
        """How long it has been found stopped while it starts. Once it is ready, meetings show whether it runs."""
        if self.facts is not None or not self.handle.is_stopped():
            self.stopped_since_s = None
            return 0.0
        now_s = time.monotonic()
        self.stopped_since_s = self.stopped_since_s or now_s
        return now_s - self.stopped_since_s


class _StepClock:
    """Counts steps, and the time in which at least one of them runs."""

    def __init__(self) -> None:
        self.num_ended = 0
        self.ran_s = 0.0
        self._num_running = 0
        self._begun_s = 0.0

    def begin(self) -> None:
        """Note that a step begins."""
        if not self._num_running:
            self._begun_s = time.monotonic()
        self._num_running += 1

    def end(self) -> None:
        """Note that a step has ended. One that began before this clock did does not count."""
        if not self._num_running:
            return
        self._num_running -= 1
        self.num_ended += 1
        if not self._num_running:
            self.ran_s += time.monotonic() - self._begun_s


class RankGroup(Generic[Words]):
    """The further ranks of one model. Messages are handed out by one thread, one after another."""

    def __init__(
        self,
        size: int,
        words: Callable[[GroupMemory], Words],
        start: StartRank,
        *,
        stall_s: float,
        watch: Callable[[RankGroup[Words]], RankWatch] | None = None,
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        """Start no rank yet. size: ranks, rank 0 included. words: returns those of a group's memory.

        stall_s: after which a rank that stands still is lost. watch: finds such a rank; by default the one that has
        not arrived at a meeting where all others wait. on_lost: called on any thread once all ranks are killed.
        """
        self.size = size
        self._words = words
        self._start = start
        self._stall_s = stall_s
        self._watch_of = watch or _StillRank
        self._on_lost = on_lost
        self._changed = threading.Condition()
        self._started: dict[int, _StartedRank] = {}
        self._lost = ""
        self._awaited = _ENDED
        """Why the ranks have to be started, until they are ready."""
        self._is_closing = False
        self._num_messages = 0
        self._clock = _StepClock()
        self.num_starts = 0
        """How often the ranks were started: once, and again each time after one was lost."""
        self.memory: GroupMemory | None = None

    def start(self, expected: Mapping[str, Any]) -> GroupMemory:
        """Start all ranks and wait until they are ready. Return their new memory.

        expected: the facts that each rank must report. Raises ConfigError that names the rank and what is wrong with
        it, and MemoryError. Then nothing is left of the group.
        """
        self.close()
        self._lost, self._is_closing, self._num_messages = "", False, 0
        self._clock = _StepClock()
        self.memory = memory = GroupMemory.create()
        self.exchange = self._words(memory)
        self.num_starts += 1
        try:
            for rank in range(1, self.size):
                self._started[rank] = _StartedRank(self._start(rank, memory))
            self._watcher = threading.Thread(target=self._watch, name="penstock-ranks", daemon=True)
            self._watcher.start()
            self._await_ready(START_PATIENCE_S)
            for rank, member in self._started.items():
                _compare(rank, member.facts or {}, expected)
        except OSError as error:
            self.close()
            raise ConfigError(f"the ranks cannot be started: {error}") from error
        except BaseException:
            self.close()
            raise
        self._awaited = ""
        log.info("ranks are ready", extra={"num_ranks": self.size, "pids": self.pids, "num_starts": self.num_starts})
        return memory

    @property
    def pids(self) -> list[int]:
        """The process of each further rank, in their order."""
        return [member.pid for member in self._started.values()]

    @property
    def lost(self) -> str:
        """Why the group is lost; empty while all ranks live."""
        return self._lost

    def hand_out_step(
        self, plan: StepPlan, row_bytes: int = 0, *, returns_logits: bool = False, all_sample: bool = False
    ) -> None:
        """Hand a step to all ranks; row_bytes: what its rows take. They must have done the message before.

        Raises MemoryError and RanksLostError. Then no rank has the step.
        """
        memory = self._memory()
        memory.rows.grow(row_bytes)
        write_step(memory.messages, plan, returns_logits=returns_logits, all_sample=all_sample)
        self._hand_out(Kind.STEP)
        self._clock.begin()

    def note_step_end(self) -> None:
        """Note that a step which was handed out has ended, or failed."""
        self._clock.end()

    def hand_out_masks(self, masks: TokenMasks) -> None:
        """Hand out the masks of the last step. Raises RanksLostError."""
        write_masks(self._memory().messages, masks)
        self._hand_out(Kind.MASKS)

    def hand_out_adapter(self, adapter_slot: int, adapter: AdapterRef) -> None:
        """Ask all ranks to load an adapter. `meet` then waits for them. Raises MemoryError and RanksLostError."""
        write_adapter(self._memory().messages, adapter_slot, adapter)
        self._hand_out(Kind.ADAPTER)

    def meet(self, *, is_refused: bool) -> bool:
        """Wait until all ranks have done what a message asked for. Return whether all could. Raises RanksLostError."""
        is_done = self.exchange.meet(is_refused=is_refused)
        self.check()
        return is_done

    def check(self) -> None:
        """Raise RanksLostError if a rank was lost."""
        if self.memory is None or self._lost or self.exchange.is_aborted:
            raise RanksLostError(self._lost or _ENDED)

    @property
    def stats(self) -> RankStats:
        """What the ranks have spent at meetings since the last start. Any thread may read it."""
        with self._changed:
            if self.memory is None or self._awaited:
                return RankStats(self.size, self.num_starts, lost=self._awaited)
            states = [self.exchange.state_of(rank) for rank in range(self.size)]
            waited_s = tuple(state.waited_ns / 1e9 for state in states)
            exchanged_s = tuple(state.exchanged_ns / 1e9 for state in states)
            clock = self._clock
            return RankStats(
                self.size,
                self.num_starts,
                waited_s,
                exchanged_s,
                int(states[0].meetings),
                num_steps=clock.num_ended,
                stepped_s=clock.ran_s,
            )

    def with_bytes(self, stats: RankStats, own: RankBytes) -> RankStats:
        """Add what each rank holds, as far as all have told it; own: what rank 0 holds."""
        with self._changed:
            others = [RankBytes(member.weight_bytes, member.kv_bytes) for member in self._started.values()]
        weights, kv_blocks = zip(own, *others, strict=True)
        is_known = 1 + len(others) == self.size
        return replace(
            stats,
            weight_bytes=weights if is_known and all(weights) else (),
            kv_bytes=kv_blocks if is_known and all(kv_blocks) else (),
        )

    @property
    def is_lost(self) -> bool:
        """Whether a rank was lost, or none is started."""
        return self.memory is None or bool(self._lost)

    def close(self) -> None:
        """End all ranks and free what they share; nothing of them is left. No step may be running."""
        if self.memory is None:
            return
        with self._changed:
            self._is_closing = True
        self.exchange.abort()
        for member in self._started.values():
            member.handle.kill()
        if (watcher := getattr(self, "_watcher", None)) is not None and watcher.ident is not None:
            watcher.join()
        for member in self._started.values():
            member.handle.close()
        # Keyed by id: number of a rank.
        self._started = {}
        with self._changed:
            self.memory.close()
            self.memory = None
            self._awaited = self._lost or _ENDED

    def _memory(self) -> GroupMemory:
        self.check()
        if self.memory is None:
            raise RanksLostError(_ENDED)
        return self.memory

    def _hand_out(self, kind: Kind) -> None:
        self._memory().note_message(kind)
        self._num_messages += 1
        self.exchange.hand_out(self._num_messages)

    def _await_ready(self, patience_s: float) -> None:
        def is_decided() -> bool:
            return bool(self._lost) or all(member.facts is not None for member in self._started.values())

        with self._changed:
            if not self._changed.wait_for(is_decided, patience_s):
                late = [str(rank) for rank, member in self._started.items() if member.facts is None]
                raise ConfigError(f"rank {', '.join(late)} has not started within {patience_s:g} s")
            if self._lost:
                raise ConfigError(self._lost)

    def _watch(self) -> None:
        """Show life, read the ranks' reports, and look for ranks that have ended or hang, until the group ends."""
        hung = self._watch_of(self)
        memory, members = self.memory, self._started
        while not self._is_closing and not self._lost and memory is not None:
            memory.show_life()
            readable, _, _ = select.select([member.handle for member in members.values()], [], [], _LOOK_S)
            for rank, member in members.items():
                if member.handle in readable:
                    self._read(rank, member)
                elif (for_s := member.stopped_s()) >= self._stall_s:
                    self.lose(f"rank {rank} cannot start: a signal has stopped it for {for_s:.1f} s")
            if (still := hung.look()) is not None and hung.for_s >= self._stall_s:
                self.lose(f"rank {still} hangs: it has stood still for {hung.for_s:.1f} s while the others waited")

    def _read(self, rank: int, member: _StartedRank) -> None:
        more = os.read(member.handle.fileno(), _MAX_REPORT_BYTES)
        if not more:
            self.lose(f"rank {rank} ended")
            return
        member.report += more
        *lines, rest = member.report.split(b"\n")
        member.report = rest
        for line in lines:
            event = json.loads(line)
            if "error" in event:
                self.lose(f"rank {rank}: {event['error']}")
            with self._changed:
                member.facts, member.pid = event.get("ready", member.facts), event.get("pid", member.pid)
                member.weight_bytes = event.get("weight_bytes", member.weight_bytes)
                member.kv_bytes = event.get("kv_bytes", member.kv_bytes)
                self._changed.notify_all()

    def lose(self, why: str) -> None:
        """End the group, on any thread. Waits at meetings return at once, and each rank is killed."""
        with self._changed:
            if self._is_closing or self._lost:
                return
            self._lost = self._awaited = why
            self.exchange.abort()
            self._changed.notify_all()
        log.error("the ranks are lost", extra={"reason": why})
        for member in self._started.values():
            member.handle.kill()
        self._on_lost()


class _StillRank:
    """Finds a rank that stands still while all others wait for it. Ranks that are slow together do not hang."""

    def __init__(self, group: RankGroup[Words]) -> None:
        self._states = [group.exchange.state_of(rank) for rank in range(group.size)]
        self._seen = -1, -1
        self._looked_s = time.monotonic()
        self.for_s = 0.0
        """How long it has stood still. Time in which this process did not run does not count."""

    def look(self) -> int | None:
        """Return the rank, if there is one, and measure its time."""
        now_s = time.monotonic()
        passed_s, self._looked_s = min(now_s - self._looked_s, 2 * _LOOK_S), now_s
        # A rank that was stopped at a meeting still shows that it waits there, when the others are at the next one.
        last = max(state.meetings for state in self._states)
        late = [rank for rank, one in enumerate(self._states) if not one.is_waiting or one.meetings < last]
        # Rank 0 is watched as a part of the engine.
        if len(late) != 1 or late[0] == 0:
            self._seen, self.for_s = (-1, -1), 0.0
            return None
        now = late[0], int(self._states[late[0]].meetings)
        self.for_s = self.for_s + passed_s if now == self._seen else 0.0
        self._seen = now
        return late[0]


def _compare(rank: int, facts: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    different: Sequence[str] = [name for name in expected if facts.get(name) != expected[name]]
    if different:
        name = different[0]
        raise ConfigError(f"rank {rank} has another {name}: {facts.get(name)!r}, and rank 0 has {expected[name]!r}")
