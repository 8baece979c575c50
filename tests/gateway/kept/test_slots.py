"""A slot tells exactly which bytes a client lacks, whenever its gateway is killed."""

from __future__ import annotations

import mmap
import random
import socket
import zlib
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import count, pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.gateway.http.protocol import MAX_BUFFERED_BYTES
from penstock.gateway.kept import slots
from penstock.gateway.kept.answer import KeptTransport
from penstock.gateway.kept.slots import (
    ANSWERING,
    EMPTY,
    FINAL,
    IDLE,
    LOST,
    MAX_RECORD_BYTES,
    SLOT_BYTES,
    VERSION,
    AnswerSlot,
    Slots,
    Stage,
    memory_bytes,
)
from penstock.gateway.stream.direct_body import KeptBody
from penstock.runtime import crash_points
from penstock.runtime.kept_sockets import counts_of


class KilledError(Exception):
    """In place of a SIGKILL."""


class Connection:
    """A connection whose kernel takes some of the bytes that are written."""

    def __init__(self) -> None:
        self.taken = bytearray()
        self.waiting = bytearray()

    def write(self, data: bytes) -> None:
        self.waiting += data
        self.take(max(len(self.waiting) - MAX_BUFFERED_BYTES, 0))
        self.take(random.choice((0, len(self.waiting), len(self.waiting) // 2)))

    def take(self, num_bytes: int) -> None:
        self.taken += self.waiting[:num_bytes]
        del self.waiting[:num_bytes]


def killing(dies_at: str, numbers: Iterator[int], kill_at: int, _: str, what: str) -> None:
    if what == dies_at and next(numbers) == kill_at:
        raise KilledError


class ArmedCount:
    """The counts of small parts, with a point at which the gateway may be killed before each store and after all."""

    size, iter_unpack = slots._COUNT.size, slots._COUNT.iter_unpack
    unpack_from, _pack_into = slots._COUNT.unpack_from, slots._COUNT.pack_into

    def pack_into(self, memory: mmap.mmap, place: int, *numbers: int) -> None:
        stored = [*self.unpack_from(memory, place)]
        for at, number in enumerate(numbers):
            crash_points.point("before", "store")
            stored[at] = number
            self._pack_into(memory, place, *stored)
        crash_points.point("before", "store")


@pytest.fixture
def memory() -> mmap.mmap:
    return mmap.mmap(-1, memory_bytes(2))


def framed(event: bytes) -> bytes:
    """Return a chunk of HTTP/1.1."""
    return b"%x\r\n%b\r\n" % (len(event), event)


class Never:
    """An answer that need not be given up."""


def body_of(slot: AnswerSlot, connection: Connection) -> KeptBody:
    """Return the body of an answer as the gateway makes it."""

    def write(data: bytes) -> None:
        crash_points.point("between", "commit and write")
        connection.write(data)
        crash_points.point("between", "write and look")

    transport: Any = SimpleNamespace(get_write_buffer_size=lambda: len(connection.waiting), write=write)
    cycle: Any = SimpleNamespace(transport=KeptTransport(transport, slot, cast(Any, Never())), flow=None)
    return KeptBody(cycle, slot, transport)


class Sent:
    """One answer: what is written of it, and what its slot must say then."""

    def __init__(self, slot: AnswerSlot) -> None:
        self.connection = Connection()
        self._body = body_of(slot, self.connection)
        self._slot = slot
        self._seen = [(0, b"")]
        self._next = 0
        self.num_small = 0
        slot.begin(b"record", 1, num_before=7, num_read=9)

    def write(self, event: bytes) -> None:
        """Write an event, at which the gateway may be killed."""
        total, events = self._seen[-1]
        self._seen.append((total + len(framed(event)), events + event))
        self.num_small += 0 < self._slot.small >= len(framed(event))
        self._body.write(event, event)

    def check(self, slot: AnswerSlot) -> None:
        """Check what a successor finds, and go on with the answer."""
        left = slot.left()
        assert (left.state, left.record, left.num_before, left.num_read) == (ANSWERING, b"record", 7, 9)
        # The part at which the gateway was killed is counted whole, or not at all.
        events = dict(self._seen)[left.total]
        whole = [events for end, events in self._seen if end <= left.total]
        sent = b"".join(framed(after[len(before) :]) for before, after in pairwise(whole))
        assert left.counters == (len(events), zlib.adler32(events))
        taken = bytes(self.connection.taken)
        slot.continue_from(left)
        assert taken + slot.rest(left, len(taken)) == sent
        self.connection.waiting[:] = sent[len(taken) :]
        self._slot, self._body = slot, body_of(slot, self.connection)
        self._seen = [(total, events) for total, events in self._seen if total <= left.total]


KILLS = ("", "ring and commit", "store", "commit and write", "write and look")


@pytest.mark.parametrize("dies_at", KILLS)
@pytest.mark.parametrize("size", [100, 40_000])
def test_a_successor_sends_exactly_what_the_kernel_has_not_got(tmp_path, monkeypatch, dies_at, size):
    """Of answers that are written by turns, and so does its own successor."""
    random.seed(size)
    num_small = 0
    for _ in range(60):
        (tmp_path / "memory").write_bytes(b"")
        with open(tmp_path / "memory", "r+b") as file:
            first = Slots(file.fileno(), 3)
            answers = {slot.number: Sent(slot) for _ in range(3) if (slot := first.take()) is not None}
            for _ in range(3):
                kill_at = random.randint(0, 80)
                monkeypatch.setattr(slots, "_COUNT", ArmedCount())
                monkeypatch.setattr(crash_points, "point", partial(killing, dies_at, count(), kill_at))
                with suppress(KilledError):
                    for _ in range(random.randint(1, 60)):
                        random.choice([*answers.values()]).write(random.randbytes(random.randint(1, size)))
                monkeypatch.undo()
                for slot in Slots(file.fileno(), 3).taken([*answers]):
                    answers[slot.number].check(slot)
                    # It goes on with this answer before it has looked at the next one.
                    for _ in range(random.randint(0, 4)):
                        answers[slot.number].write(random.randbytes(random.randint(1, size)))
        num_small += sum(answer.num_small for answer in answers.values())
    assert num_small > 100


def test_a_slow_client_needs_both_halves_of_the_ring_and_no_more(memory):
    slot, waiting = AnswerSlot(memory, 0), 16_000
    slot.begin(b"r" * 1000, 1, num_before=0, num_read=0)
    sent = bytearray()
    for number in range(300):
        part = bytes([number % 256]) * 10_000
        sent += part
        assert slot.put(part, min(waiting, len(sent) - len(part)))
        left = slot.left()
        assert slot.rest(left, len(sent) - min(waiting, len(sent))) == sent[-waiting:]
    assert bytes(memory[SLOT_BYTES : 2 * SLOT_BYTES]) == bytes(SLOT_BYTES)


def test_what_does_not_fit_is_not_kept(memory):
    slot = AnswerSlot(memory, 0)
    slot.begin(b"", 1, num_before=0, num_read=0)
    assert not slot.put(bytes(SLOT_BYTES), 0)
    slot.lose()
    assert slot.left().state == LOST
    slot.begin(b"", 1, num_before=0, num_read=0)
    assert slot.add(bytes(1000)) and not slot.add(bytes(MAX_RECORD_BYTES))
    assert slot.put(b"head", 0) and not slot.add(b"late")
    assert slot.left().record == bytes(1000)


@pytest.mark.parametrize("size", [10, 50_000])
def test_texts_are_gone_from_the_memory_once_an_answer_is_complete(memory, size):
    slot, connection = AnswerSlot(memory, 0), Connection()
    slot.begin(b"secret" * 50, 1, num_before=0, num_read=0)
    slot.put(b"head", 0)
    slot.open_short_way()
    body_of(slot, connection).write(b"secret", b"secret")
    assert slot.left().total == 4 + len(framed(b"secret"))
    slot.note(FINAL)
    slot.put(b"secret" * size, 0)
    assert slot.left().flags == FINAL
    slot.idle(77)
    assert (slot.left().state, slot.left().num_read) == (IDLE, 77)
    assert b"secret" not in memory[:]
    slot.clear()
    assert slot.left().state == EMPTY


def test_only_the_text_of_an_open_answer_stays_where_those_of_all_come_by_turns(memory):
    stage = Stage(memory)
    slots = [AnswerSlot(memory, number, stage) for number in range(2)]
    for slot, text in zip(slots, (b"secret" * 5, b"open"), strict=True):
        slot.begin(b"", 1, num_before=0, num_read=0)
        slot.open_short_way()
        slot.stage(framed(text), text)
    assert b"secret" in memory[:]
    slots[0].idle(0)
    assert b"secret" not in memory[:] and slots[1].rest(slots[1].left(), 0) == framed(b"open")
    slots[1].clear()
    assert b"open" not in memory[:]


def test_a_slot_of_another_version_is_refused(memory):
    slot = AnswerSlot(memory, 0)
    slot.begin(b"", 1, num_before=0, num_read=0)
    memory[0] = VERSION + 1
    with pytest.raises(ValueError, match="version"):
        slot.left()


def test_slots_are_given_once(tmp_path):
    with open(tmp_path / "memory", "w+b") as file:
        file.truncate(memory_bytes(3))
        slots = Slots(file.fileno(), 3)
        assert [slot.number for slot in slots.taken([1])] == [1]
        first, second = slots.take(), slots.take()
        assert first is not None and second is not None and {first.number, second.number} == {0, 2}
        assert slots.take() is None
        slots.free(1)
        third = slots.take()
        assert third is not None and third.number == 1


def test_the_kernel_tells_what_it_has_taken_and_what_was_read():
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as peer:
        ours, _ = listener.accept()
        with ours:
            ours.setblocking(False)
            counts = counts_of(ours.fileno())
            assert counts is not None and (counts.num_accepted, counts.num_read) == (0, 0)
            taken = 0
            with pytest.raises(BlockingIOError):
                while True:
                    taken += ours.send(bytes(100_000))
            peer.sendall(b"12345")
            counts = counts_of(ours.fileno())
            assert counts is not None and counts.num_accepted == taken
            got = 0
            while got < taken:
                got += len(peer.recv(1 << 16))
                counts = counts_of(ours.fileno())
                assert counts is not None and counts.num_accepted == taken
            peer.shutdown(socket.SHUT_WR)
            ours.setblocking(True)
            assert ours.recv(3) == b"123"
            counts = counts_of(ours.fileno())
            assert counts is not None and counts.num_read == 3
            assert ours.recv(3) == b"45" and ours.recv(3) == b""
            counts = counts_of(ours.fileno())
            assert counts is not None and counts.num_read == 5
