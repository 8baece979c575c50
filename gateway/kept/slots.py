"""The slots of shared memory in which a gateway notes its open answers for its successor.

The memory is a memfd of the keeper. Each connection that is kept has a slot, which holds of its answer:

    fixed part   state, record length, and what the kernel counted when the answer began
    two commits  how far the answer is; one byte says which of both holds
    record       what the answer is made from, besides the log of its jobs
    ring         the newest bytes for the client: at least those that the kernel has not taken
    two parts    the newest small part and the one before it, each with how far the answer is behind it

Bytes come into the ring before they are written to the connection, then a commit counts them. A commit goes into the
other place than the one that holds, and counts by the store of one byte. So the process may be killed at any
instruction. Where the connection has taken all earlier bytes, the ring begins anew, so a client that keeps up needs
one page of memory. Otherwise the bytes that still wait move to the other half of the ring.

Nearly all parts are one event of one job for a client that keeps up. Such a small part (`KeptBody.write`) goes to
one of two places in turn. Two stores count it, of which the second one decides, because the place with more bytes of
the answer holds, if these are more than the commit's. So the part before it is whole whenever the process is killed.
The small parts of all slots lie side by side behind the slots: the addresses of the slots themselves compete for the
same places of the processor's caches.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from zlib import adler32

from penstock.runtime import crash_points

SLOT_BYTES = 1 << 20
"""Address space of a slot. Only the pages that were written take memory."""
MAX_RECORD_BYTES = 256 << 10
"""The largest record of an answer. An answer with a larger one is not kept."""
MAX_COUNTERS = 64
"""Most jobs of a stream that is kept."""
VERSION = 3
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
NO_CHECKSUM = 0
"""In place of the checksum in a stream of one job: it would take as long as all else that a token needs. The successor
compares the newest part instead."""
TURN_WORDS, WORD_BYTES = 64, 8
"""Numbers of eight bytes in the place of a small part. Each number is one store."""
PART_AT = 2
"""Number of the part's first word. Before it are the bytes of the answer, and the event bytes of its job."""
SMALL_BYTES = (TURN_WORDS - PART_AT) * WORD_BYTES
"""The largest small part."""
_TURNS_BYTES = 2 * TURN_WORDS * WORD_BYTES
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
    newest: bytes = b""
    """The newest events, if a small part has them as they are: the last of the event bytes that are counted."""


class AnswerSlot:
    """One slot, as the gateway that has its connection writes it.

    The fields without an underscore, but `number` and `status`, are those that `KeptBody.write` needs for each token.
    """

    __slots__ = (
        "_at",
        "_base",
        "_commit",
        "_commits",
        "_committed",
        "_first_word",
        "_highest",
        "_others",
        "_place",
        "_room",
        "_selector",
        "_selector_at",
        "_start",
        "_used",
        "checksum",
        "flags",
        "memory",
        "num_events",
        "number",
        "small",
        "status",
        "total",
        "word",
        "words",
    )

    def __init__(self, memory: mmap.mmap, number: int, words: memoryview | None = None) -> None:
        """`words`: the memory as numbers of eight bytes. All slots can share it."""
        self.memory = memory
        self.words = memoryview(memory).cast("Q") if words is None else words
        self._base = number * SLOT_BYTES
        turns = len(memory) // (SLOT_BYTES + _TURNS_BYTES) * SLOT_BYTES + number * _TURNS_BYTES
        self.word = self._first_word = turns // WORD_BYTES
        """The first word of the newest small part, or of the place of none; and that of the first place."""
        self.number = number
        self._highest = self._base
        """The end of the memory that was written."""
        self._reset(0, 1)

    def _reset(self, record_bytes: int, num_counters: int, *, has_checksums: bool = True) -> None:
        self._commit = _COMMITS[num_counters]
        first = self._base + _FIXED.size
        self._commits = (first, first + self._commit.size)
        self._selector, self._selector_at = 0, self._base + _SELECTOR
        self._start = self._used = self._committed = 0
        self.total = self.status = self.flags = 0
        """Bytes of the answer, its status, and flags. Only `put` may follow a change of both latter ones."""
        self.num_events, self.checksum = NO_EVENTS
        if num_counters == 1 and not has_checksums:
            self.checksum = NO_CHECKSUM  # Only such a slot has small parts.
        self._others = [*NO_EVENTS * (num_counters - 1)]
        """The counters of all jobs but the first. Most answers have one job, so its counter is apart."""
        self.word = self._first_word
        self.small = 0
        """The largest part that may take the short way now."""
        self._at = self._record_at + record_bytes
        self._place = self._at - self._base
        self._room = self._base + _HALF - self._at

    @property
    def counters(self) -> tuple[int, ...]:
        """For each job, the number of event bytes so far, and their checksum."""
        return (self.num_events, self.checksum, *self._others)

    @counters.setter
    def counters(self, counters: Sequence[int]) -> None:
        self.num_events, self.checksum, *self._others = counters

    @property
    def _record_at(self) -> int:
        return self._commits[1] + self._commit.size

    def begin(
        self,
        record: bytes,
        num_counters: int,
        *,
        num_before: int,
        num_read: int,
        is_ahead: bool = False,
        has_checksums: bool = True,
    ) -> None:
        """Note an answer before its first byte. The numbers and `is_ahead` are those of `Left`.

        `has_checksums`: that of the only job is computed; those of several ones always are.
        """
        self.clear(LOST)
        self._reset(len(record), num_counters, has_checksums=has_checksums)
        memory, base = self.memory, self._base
        fixed = (VERSION, LOST, 0, is_ahead, 0, num_counters, len(record), num_before, num_read)
        _FIXED.pack_into(memory, base, *fixed)
        self._commit.pack_into(memory, self._commits[0], 0, 0, 0, 0, 0, *self.counters)
        memory[self._record_at : self._at] = record
        self._highest = max(self._highest, self._at)
        self.words[self.word] = self.words[self.word ^ TURN_WORDS] = 0
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
        if not counter:
            self.num_events += len(events)
            if self.checksum != NO_CHECKSUM:
                self.checksum = adler32(events, self.checksum)
        else:
            others, at = self._others, 2 * counter - 2
            others[at] += len(events)
            others[at + 1] = adler32(events, others[at + 1])

    def note(self, flags: int) -> None:
        """Set the flags of the next commit."""
        if flags != self.flags:
            self.flags, self.small = flags, 0

    def put(self, data: bytes, num_waiting: int) -> bool:
        """Note the answer's next bytes, before they are written. Return whether the slot could.

        `num_waiting`: bytes of the connection that the kernel has not taken.
        """
        size = used = len(data)
        if num_waiting:
            if self.total != self._committed:
                self._take_back()
            end, used = self._at + self._used, self._used + size
        else:
            self._start, end = self.total, self._at
        if used > self._room:
            if not self._move(num_waiting, size):
                return False
            end, used = self._at + self._used, self._used + size
        memory, top = self.memory, end + size
        memory[end:top] = data
        crash_points.point("between", "ring and commit")
        self._used = used
        self.total = self._committed = total = self.total + size
        if top > self._highest:
            self._highest = top
        self._selector = selector = 1 - self._selector
        at, flags = self._commits[selector], self.flags
        self._commit.pack_into(memory, at, total, self._start, self._place, self.status, flags, *self.counters)
        memory[self._selector_at] = selector
        if self.checksum == NO_CHECKSUM:
            # The next small part begins here.
            word, words = self.word, self.words
            words[word + 1] = self.num_events
            words[word] = total
            self.small = SMALL_BYTES
        return True

    def _take_back(self) -> None:
        """Let the ring begin with the newest small part, which may wait yet."""
        start, word = self.words[self.word ^ TURN_WORDS], self.word
        self._start, self._used = start, self.words[word] - start
        part = (word + PART_AT) * WORD_BYTES
        self.memory[self._at : self._at + self._used] = self.memory[part : part + self._used]

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
            turns = self._first_word * WORD_BYTES
            memory[turns : turns + _TURNS_BYTES] = bytes(_TURNS_BYTES)
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
        record, newest = memory[record_at : record_at + size], b""
        word = self._newest_word()
        if (end := self.words[word]) > total:
            other = word ^ TURN_WORDS
            total, start, num_before = end, self.words[other], self.words[other + 1]
            at, counters[0] = (word + PART_AT) * WORD_BYTES - base, self.words[word + 1]
            newest = _events_in(memory[base + at : base + at + total - start], counters[0] - num_before)
        answer = (total, start, at, status, flags, tuple(counters), newest)
        return Left(version, state, bool(ahead), takeovers, record, before, read, *answer)

    def _newest_word(self) -> int:
        first, second = self._first_word, self._first_word ^ TURN_WORDS
        return second if self.words[second] > self.words[first] else first

    def continue_from(self, left: Left) -> None:
        """Go on with what an earlier gateway left."""
        self._reset(len(left.record), len(left.counters) // 2 or 1)
        memory, base = self.memory, self._base
        self._selector = memory[base + _SELECTOR]
        self._highest = base + SLOT_BYTES  # Its end is not known, so all goes back at the end.
        self.total, self.status, self.flags = left.total, left.status, left.flags
        self.counters = left.counters or self.counters
        self.word = self._newest_word()
        if base + left.at >= self._first_word * WORD_BYTES:
            return  # The newest part is a small one: `put` takes it back.
        self._committed = left.total
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


def _events_in(part: bytes, size: int) -> bytes:
    """Return the events of a chunk of HTTP/1.1 of which they are the whole content, or nothing."""
    events = part.partition(b"\r\n")[2][:-2]
    return events if len(events) == size else b""


def memory_bytes(count: int) -> int:
    """Return the size of the memory of so many slots."""
    return count * (SLOT_BYTES + _TURNS_BYTES)


class Slots:
    """All slots of a gateway."""

    def __init__(self, descriptor: int, count: int) -> None:
        if os.fstat(descriptor).st_size < memory_bytes(count):
            os.ftruncate(descriptor, memory_bytes(count))  # Its keeper is of an earlier version.
        self._memory = mmap.mmap(descriptor, memory_bytes(count))
        self._words = memoryview(self._memory).cast("Q")
        self._free = list(range(count - 1, -1, -1))

    def take(self) -> AnswerSlot | None:
        """Return a free slot, or None if there is none."""
        return AnswerSlot(self._memory, self._free.pop(), self._words) if self._free else None

    def taken(self, numbers: Sequence[int]) -> list[AnswerSlot]:
        """Return the slots of an earlier gateway; all others are free."""
        used = set(numbers)
        self._free = [number for number in self._free if number not in used]
        return [AnswerSlot(self._memory, number, self._words) for number in numbers]

    def free(self, number: int) -> None:
        """Take back the slot of a connection that the keeper has been told to drop."""
        self._free.append(number)
