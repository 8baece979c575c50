"""The slots of shared memory in which a gateway notes its open answers for its successor.

The memory is a memfd of the keeper. Each connection that is kept has a slot, which holds of its answer:

    fixed part   state, record length, and what the kernel counted when the answer began
    two commits  how far the answer is; one byte says which of both holds
    record       what the answer is made from, besides the log of its jobs
    ring         the newest bytes for the client: at least those that the kernel has not taken

Bytes come into the ring before they are written to the connection, then a commit counts them. A commit goes into the
other place than the one that holds, and counts by the store of one byte. So the process may be killed at any
instruction. Where the connection has taken all earlier bytes, the ring begins anew, so a client that keeps up needs
one page of memory. Otherwise the bytes that still wait move to the other half of the ring.

Nearly all parts are one event of one job for a client that keeps up. Such a small part (`SmallParts.stage`) takes a
short way, because each cache line that an event of one of thousands of streams needs is fetched from memory. Behind the
slots lie, for each slot, two counts in turn, and for all of them one stage:

    count        event bytes of the job and their checksum, bytes of the part, and bytes of the answer
    stage        the number of a slot, and the newest part of its answer

The count with more bytes of the answer holds, if these are more than the commit's. They are stored last, when the part
is in the stage. The next part, of whichever answer, may take its place there, because by then the connection has taken
it: `KeptBody.write` looks, and otherwise moves it to the ring.

At the end, a word for each slot has the descriptor of its connection in the gateway, for its holder (`holder.py`).
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from zlib import adler32

from penstock.runtime import crash_points

SLOT_BYTES = 1 << 20
"""Address space of a slot. Only the pages that were written take memory."""
MAX_RECORD_BYTES = 256 << 10
"""The largest record of an answer. An answer with a larger one is not kept."""
MAX_COUNTERS = 64
"""Most jobs of a stream that is kept."""
VERSION = 5
"""Of the layout. A successor of another version cannot go on with the answers."""
FINAL, FAILED, WITHIN, CLOSES = 1, 2, 4, 8
"""Flags of a commit: all bytes of the answer are in it; its error event is; it ends within an event; the connection
closes after the answer."""
EMPTY, IDLE, ANSWERING, LOST = 0, 1, 2, 3
"""States: no connection; no open answer; an answer with a record; an answer that can only be cut off."""
_FIXED = struct.Struct("<IBBBBIIQQ")
"""Version, state, which commit holds, whether requests were read ahead, takeovers, counters, and bytes: of the record,
those that the kernel had taken when the answer began, and those that were read of the connection."""
_STATE, _SELECTOR, _AHEAD, _TAKEOVERS, _RECORD_BYTES, _READ = 4, 5, 6, 7, 12, 24
_COMMIT = "<QQIHB"
"""Bytes of the answer so far, the number of the ring's first byte, its place, the status, and flags."""
_COUNTER = "QI"
"""Event bytes of one job, and their checksum (`zlib.adler32`, which takes less than half the time of a CRC)."""
NO_EVENTS = (0, 1)
"""The counter of a job without event bytes: the checksum of nothing is 1."""
_COUNT = struct.Struct("4Q")
"""Of a small part: event bytes of the job, their checksum, bytes of the part, and bytes of the answer. Each of these
native numbers is one store, in this order."""
_COUNTS_BYTES = 2 * _COUNT.size
_WORD_BYTES = 8
SMALL_BYTES = 4096 - _WORD_BYTES
"""The largest small part."""
_COMMITS = tuple(struct.Struct(_COMMIT + _COUNTER * number) for number in range(MAX_COUNTERS + 2))
"""By the number of counters: a stream of several jobs has one more than jobs."""
_BYTES_READ = struct.Struct("<Q")
_LENGTH = struct.Struct("<I")
_HALF = SLOT_BYTES // 2
_PAGE = mmap.PAGESIZE


@dataclass(frozen=True, slots=True)
class Left:
    """What a gateway has left in a slot."""

    version: int
    state: int
    is_ahead: bool
    """Whether it read bytes of the connection behind the request that it was answering."""
    num_takeovers: int
    """Gateways that took the answer over, and died before they had gone on with it."""
    record: bytes
    num_before: int
    """Bytes that the kernel had taken for this connection before the answer."""
    num_read: int
    """Bytes that were read of the connection, when the answer began or the last one was complete."""
    total: int = 0
    start: int = 0
    at: int = 0
    status: int = 0
    flags: int = 0
    counters: tuple[int, ...] = ()
    """For each job, the number of event bytes so far, and their checksum."""


class Stage:
    """The one place of the newest small part."""

    __slots__ = ("at", "counts_at", "memory", "word", "words")

    def __init__(self, memory: mmap.mmap) -> None:
        count = len(memory) // (SLOT_BYTES + _COUNTS_BYTES + _WORD_BYTES)
        self.memory = memory
        self.counts_at = count * SLOT_BYTES
        self.word = (self.counts_at + count * _COUNTS_BYTES) // _WORD_BYTES
        """Where the number of the slot is, plus one, in words of eight bytes. It is one store."""
        self.at = (self.word + 1) * _WORD_BYTES
        self.words = memoryview(memory).cast("Q")

    def newest_count(self, owner: int) -> tuple[int, ...]:
        """Return the count with more bytes of the answer."""
        first = self.counts_at + (owner - 1) * _COUNTS_BYTES
        return max(_COUNT.iter_unpack(self.memory[first : first + _COUNTS_BYTES]), key=lambda count: count[3])

    def clear(self, owner: int) -> None:
        """Remove all texts of a slot. The part of another one stays."""
        now, num_kept = self.words[self.word], 0
        if now not in (0, owner):
            _, _, num_kept, _ = self.newest_count(now)
        elif now:
            self.words[self.word] = 0
        self.memory[self.at + num_kept : self.at + SMALL_BYTES] = bytes(SMALL_BYTES - num_kept)


class SmallParts:
    """The short way of the small parts of one slot: all that an event needs, and nothing else."""

    __slots__ = ("_newest", "_other", "_owner", "_stage", "small")

    def __init__(self, stage: Stage, number: int) -> None:
        self.small = 0
        """The largest part that may take the short way now; 0 while bytes may wait for the connection."""
        self._newest = stage.counts_at + number * _COUNTS_BYTES
        self._other = self._newest + _COUNT.size
        """The places of both counts. The first one holds, or counts what the commit does."""
        self._owner = number + 1
        self._stage = stage

    def stage(self, part: bytes, events: bytes) -> None:
        """Note a small part before it is written, and count it and the events in it. It runs for each token."""
        stage, newest, other, size = self._stage, self._newest, self._other, len(part)
        memory, at = stage.memory, stage.at
        num_events, checksum, _, total = _COUNT.unpack_from(memory, newest)
        stage.words[stage.word] = self._owner
        memory[at : at + size] = part
        _COUNT.pack_into(memory, other, num_events + len(events), adler32(events, checksum), size, total + size)
        self._newest, self._other = other, newest


class AnswerSlot(SmallParts):
    """One slot, as the gateway that has its connection writes it."""

    __slots__ = (
        *("_at", "_base", "_checksum", "_commit", "_commits", "_highest", "_num_events", "_others", "_place", "_room"),
        *("_selector", "_selector_at", "_start", "_used", "flags", "memory", "number", "status", "total"),
    )

    def __init__(self, memory: mmap.mmap, number: int, stage: Stage | None = None) -> None:
        """`stage`: that of the memory. All slots can share the object."""
        super().__init__(stage or Stage(memory), number)
        self.memory = memory
        self._base = number * SLOT_BYTES
        self.number = number
        self._highest = self._base
        """The end of the memory that was written."""
        self._reset(0, 1)

    def _reset(self, record_bytes: int, num_counters: int) -> None:
        self._commit = _COMMITS[num_counters]
        first = self._base + _FIXED.size
        self._commits = (first, first + self._commit.size)
        self._selector, self._selector_at = 0, self._base + _SELECTOR
        self._start = self._used = self.small = 0
        self.total = self.status = self.flags = 0
        """Bytes of the answer, unless small parts were added to it; its status, and flags. Only `put` may follow a
        change of both latter ones."""
        self._num_events, self._checksum = NO_EVENTS
        self._others = [*NO_EVENTS * (num_counters - 1)]
        """The counters of all jobs but the first. Most answers have one job, so its counter is apart."""
        self._at = self._record_at + record_bytes
        self._place = self._at - self._base
        self._room = self._base + _HALF - self._at

    @property
    def counters(self) -> tuple[int, ...]:
        """For each job, the number of event bytes so far, and their checksum."""
        self._leave_short_way()
        return (self._num_events, self._checksum, *self._others)

    @counters.setter
    def counters(self, counters: Sequence[int]) -> None:
        self._leave_short_way()
        self._num_events, self._checksum, *self._others = counters

    @property
    def _record_at(self) -> int:
        return self._commits[1] + self._commit.size

    def begin(
        self, record: bytes, num_counters: int, *, num_before: int, num_read: int, is_ahead: bool = False
    ) -> None:
        """Note an answer before its first byte. The numbers and `is_ahead` are those of `Left`."""
        self.clear(LOST)
        self._reset(len(record), num_counters)
        memory, base = self.memory, self._base
        fixed = (VERSION, LOST, 0, is_ahead, 0, num_counters, len(record), num_before, num_read)
        _FIXED.pack_into(memory, base, *fixed)
        self._commit.pack_into(memory, self._commits[0], 0, 0, 0, 0, 0, *self.counters)
        memory[self._record_at : self._at] = record
        self._highest = max(self._highest, self._at)
        for place in (self._newest, self._other):
            _COUNT.pack_into(memory, place, *NO_EVENTS, 0, 0)
        memory[base + _STATE] = ANSWERING

    def add(self, more: bytes) -> bool:
        """Append to the record, before the answer's first byte. Return whether there is room."""
        if self.total or self._at + len(more) - self._record_at > MAX_RECORD_BYTES:
            return False
        memory = self.memory
        memory[self._at : self._at + len(more)] = more
        self._at += len(more)
        self._place += len(more)
        self._room -= len(more)
        self._highest = max(self._highest, self._at)
        _LENGTH.pack_into(memory, self._base + _RECORD_BYTES, self._at - self._record_at)
        return True

    def count(self, counter: int, events: bytes) -> None:
        """Count the events of a job that the next commit includes."""
        self._leave_short_way()
        if not counter:
            self._num_events += len(events)
            self._checksum = adler32(events, self._checksum)
        else:
            others, at = self._others, 2 * counter - 2
            others[at] += len(events)
            others[at + 1] = adler32(events, others[at + 1])

    def note(self, flags: int) -> None:
        """Set the flags of the next commit."""
        if flags != self.flags:
            self._leave_short_way()
            self.flags = flags

    def put(self, data: bytes, num_waiting: int) -> bool:
        """Note the answer's next bytes, before they are written. Return whether the slot could.

        `num_waiting`: bytes of the connection that the kernel has not taken.
        """
        self._leave_short_way()
        size = used = len(data)
        if num_waiting:
            end, used = self._at + self._used, self._used + size
        else:
            self._start, end = self.total, self._at
        if used > self._room:
            if not self._move(num_waiting, size):
                return False
            end, used = self._at + self._used, self._used + size
        self.memory[end : end + size] = data
        crash_points.point("between", "ring and commit")
        self._used = used
        self.total += size
        self._highest = max(self._highest, end + size)
        self._count_all()
        return True

    def _count_all(self) -> None:
        """Let a commit count what the ring has."""
        self._selector = selector = 1 - self._selector
        numbers = (self.total, self._start, self._place, self.status, self.flags, *self.counters)
        self._commit.pack_into(self.memory, self._commits[selector], *numbers)
        self.memory[self._selector_at] = selector

    def open_short_way(self) -> None:
        """Let small parts of the only job follow, because the connection has taken all bytes."""
        if not self._others:
            # No more bytes than the commit has, so this count does not hold.
            _COUNT.pack_into(self.memory, self._newest, self._num_events, self._checksum, 0, self.total)
            self.small = SMALL_BYTES

    def _leave_short_way(self) -> None:
        if self.small:
            self._num_events, self._checksum, _, self.total = _COUNT.unpack_from(self.memory, self._newest)
            self.small = 0

    def keep_staged(self, part: bytes) -> None:
        """Move the newest small part to the ring, because the connection has not taken all of it."""
        self._leave_short_way()
        self._start, self._used = self.total - len(part), len(part)
        self.memory[self._at : self._at + len(part)] = part
        self._highest = max(self._highest, self._at + len(part))
        crash_points.point("between", "ring and commit")
        self._count_all()

    def _move(self, num_waiting: int, size: int) -> bool:
        """Let the ring go on in the other half, with the bytes that still wait. Return whether both have room there."""
        num_waiting = min(num_waiting, self._used) if num_waiting else 0
        is_first = self._at < self._base + _HALF
        at = self._base + (_HALF if is_first else self._record_end())
        room = _HALF if is_first else self._base + _HALF - at
        if num_waiting + size > room:
            return False
        end = self._at + self._used
        self.memory[at : at + num_waiting] = self.memory[end - num_waiting : end]
        self._at, self._place, self._room = at, at - self._base, room
        self._start, self._used = self.total - num_waiting, num_waiting
        self._highest = max(self._highest, at + num_waiting)
        return True

    def _record_end(self) -> int:
        (size,) = _LENGTH.unpack_from(self.memory, self._base + _RECORD_BYTES)
        return self._record_at + int(size)

    def idle(self, num_read: int) -> None:
        """Note that the answer is complete, and how many bytes of the connection were read by then."""
        self.clear(LOST)
        _BYTES_READ.pack_into(self.memory, self._base + _READ, num_read)
        self.memory[self._base + _STATE] = IDLE

    def lose(self) -> None:
        """Note that no successor can go on with the answer."""
        self.clear(LOST)

    def note_ahead(self) -> None:
        """Note that bytes behind the request were read."""
        self.memory[self._base + _AHEAD] = 1

    def set_takeovers(self, number: int) -> None:
        """Note how many gateways have died with this answer before they had gone on with it."""
        self.memory[self._base + _TAKEOVERS] = number

    def clear(self, state: int = EMPTY) -> None:
        """Remove the texts of the answer from the memory."""
        memory, base = self.memory, self._base
        memory[base + _STATE] = state
        self.small = 0
        # The state keeps its place in the first page; further pages go back to the system.
        if self._highest > base + _PAGE:
            memory.madvise(mmap.MADV_REMOVE, base + _PAGE, -(-(self._highest - base) // _PAGE) * _PAGE - _PAGE)
        last = min(self._highest, base + _PAGE)
        start = base + _FIXED.size
        if last > start:
            memory[start:last] = bytes(last - start)
            self._stage.clear(self._owner)
        self._highest = base

    def left(self) -> Left:
        """Return what the slot has of an earlier gateway. Raises ValueError if it is not of this version."""
        memory, base = self.memory, self._base
        version, state, selector, ahead, takeovers, num_counters, size, before, read = _FIXED.unpack_from(memory, base)
        if version != VERSION or num_counters > MAX_COUNTERS + 1 or size > MAX_RECORD_BYTES:
            raise ValueError(f"a slot of version {version}")
        if state != ANSWERING:
            return Left(version, state, bool(ahead), takeovers, b"", before, read)
        commit = _COMMITS[num_counters]
        first = base + _FIXED.size
        record_at = first + 2 * commit.size
        total, start, at, status, flags, *counters = commit.unpack_from(memory, first + selector * commit.size)
        record = memory[record_at : record_at + size]
        num_events, checksum, part_bytes, end = self._stage.newest_count(self._owner)
        if end > total:
            total, counters[:2] = end, (num_events, checksum)
            # A part that is not in the stage was taken as a whole.
            start = total - part_bytes if self.is_staged else total
            at = self._stage.at - base
        answer = (total, start, at, status, flags, tuple(counters))
        return Left(version, state, bool(ahead), takeovers, record, before, read, *answer)

    @property
    def is_staged(self) -> bool:
        """Whether the stage has the newest part of this slot, or one that was never counted."""
        return self._stage.words[self._stage.word] == self._owner

    def continue_from(self, left: Left) -> None:
        """Go on with what an earlier gateway left."""
        self._reset(len(left.record), len(left.counters) // 2 or 1)
        memory, base = self.memory, self._base
        self._selector = memory[base + _SELECTOR]
        self._highest = base + SLOT_BYTES  # Its end is not known, so all goes back at the end.
        self.total, self.status, self.flags = left.total, left.status, left.flags
        self.counters = left.counters or self.counters
        if base + left.at == self._stage.at:
            self.keep_staged(memory[self._stage.at : self._stage.at + left.total - left.start])
            return
        if left.at:
            self._at, self._place = base + left.at, left.at
            self._room = base + (_HALF if left.at < _HALF else SLOT_BYTES) - self._at
        self._start, self._used = left.start, left.total - left.start

    def rest(self, left: Left, num_taken: int) -> bytes:
        """Return the bytes of the answer after its first `num_taken`. Raises ValueError if the ring lacks some."""
        if not left.start <= num_taken <= left.total:
            raise ValueError(f"the ring has the bytes {left.start} to {left.total}, not those from {num_taken}")
        at = self._base + left.at - left.start
        return self.memory[at + num_taken : at + left.total]


def memory_bytes(count: int) -> int:
    """Return the size of the memory of so many slots."""
    return count * (SLOT_BYTES + _COUNTS_BYTES + _WORD_BYTES) + _WORD_BYTES + SMALL_BYTES


class ConnectionTable:
    """Which descriptor of the gateway has the connection of each slot."""

    def __init__(self, memory: mmap.mmap, count: int) -> None:
        self._words = memoryview(memory)[memory_bytes(count) - count * _WORD_BYTES : memory_bytes(count)].cast("Q")

    def note(self, number: int, descriptor: int) -> None:
        """Note the connection of a slot."""
        self._words[number] = descriptor + 1

    def forget(self, number: int) -> None:
        """Note that a slot has no connection, before its descriptor is closed."""
        self._words[number] = 0

    def forget_all(self) -> None:
        """Note that no slot has a connection."""
        for number in self.found():
            self.forget(number)

    def found(self) -> dict[int, int]:
        """Return the descriptor of each slot that has a connection."""
        return {number: word - 1 for number, word in enumerate(self._words) if word}


def mapped(descriptor: int, count: int) -> mmap.mmap:
    """Return the memory of so many slots."""
    if os.fstat(descriptor).st_size < memory_bytes(count):
        os.ftruncate(descriptor, memory_bytes(count))  # Its keeper is of an earlier version.
    return mmap.mmap(descriptor, memory_bytes(count))


class Slots:
    """All slots of a gateway."""

    def __init__(self, descriptor: int, count: int) -> None:
        self._memory = mapped(descriptor, count)
        self._stage = Stage(self._memory)
        self.connections = ConnectionTable(self._memory, count)
        self._free = list(range(count - 1, -1, -1))

    def take(self) -> AnswerSlot | None:
        """Return a free slot, or None if there is none."""
        return AnswerSlot(self._memory, self._free.pop(), self._stage) if self._free else None

    def taken(self, numbers: Sequence[int]) -> list[AnswerSlot]:
        """Return the slots of an earlier gateway; all others are free."""
        used = set(numbers)
        self._free = [number for number in self._free if number not in used]
        slots = [AnswerSlot(self._memory, number, self._stage) for number in numbers]
        for slot in slots:
            if slot.is_staged:
                # Before another answer needs the stage. A slot of another version is refused later.
                with suppress(ValueError):
                    slot.continue_from(slot.left())
        return slots

    def free(self, number: int) -> None:
        """Take back a slot that has no connection any more."""
        self._free.append(number)
