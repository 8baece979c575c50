"""A slot tells exactly which bytes a client lacks, whenever its gateway is killed."""

from __future__ import annotations

import mmap
import random
import socket
import zlib
from collections.abc import Iterator
from functools import partial
from itertools import count, pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.gateway.http.protocol import MAX_BUFFERED_BYTES
from penstock.gateway.kept.answer import KeptTransport
from penstock.gateway.kept.slots import (
    ANSWERING,
    EMPTY,
    FINAL,
    IDLE,
    LOST,
    MAX_RECORD_BYTES,
    NO_CHECKSUM,
    SLOT_BYTES,
    SMALL_BYTES,
    VERSION,
    AnswerSlot,
    Slots,
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


class ArmedWords:
    """The numbers of a slot, with a point at which the gateway may be killed before each store."""

    def __init__(self, words: memoryview) -> None:
        self._words = words

    def __getitem__(self, word: int) -> int:
        return self._words[word]

    def __setitem__(self, word: int, number: int) -> None:
        crash_points.point("before", "store")
        self._words[word] = number


@pytest.fixture
def memory() -> mmap.mmap:
    return mmap.mmap(-1, memory_bytes(2))


def framed(event: bytes) -> bytes:
    """Return a chunk of HTTP/1.1."""
    return b"%x\r\n%b\r\n" % (len(event), event)


class Never:
    """An answer that need not be given up."""


def written(slot: AnswerSlot, connection: Connection, event: bytes) -> None:
    """Write an event of an answer as the gateway does."""

    def write(data: bytes) -> None:
        crash_points.point("between", "commit and write")
        connection.write(data)

    transport: Any = SimpleNamespace(get_write_buffer_size=lambda: len(connection.waiting), write=write)
    cycle: Any = SimpleNamespace(transport=KeptTransport(transport, slot, cast(Any, Never())), flow=None)
    KeptBody(cycle, slot, transport).write(event, event)


@pytest.mark.parametrize("dies_at", ["", "ring and commit", "store", "commit and write"])
@pytest.mark.parametrize("size", [100, 40_000])
@pytest.mark.parametrize("has_checksums", [False, True])
def test_a_successor_sends_exactly_what_the_kernel_has_not_got(memory, monkeypatch, dies_at, size, has_checksums):
    random.seed(size)
    num_small = 0
    for turn in range(60):
        slot, connection = AnswerSlot(memory, turn % 2), Connection()
        slot.begin(b"record", 1, num_before=7, num_read=9, has_checksums=has_checksums)
        slot.words = cast(memoryview, ArmedWords(slot.words))
        sent, num_parts, kill_at, events = b"", random.randint(1, 40), random.randint(0, 80), b""
        seen = [(0, b"")]

        monkeypatch.setattr(crash_points, "point", partial(killing, dies_at, count(), kill_at))
        try:
            for _ in range(num_parts):
                event = random.randbytes(random.randint(1, size))
                part = framed(event)
                seen.append((len(sent + part), events + event))
                is_small = 0 < slot.small >= len(part) and not connection.waiting
                written(slot, connection, event)
                num_small += is_small
                sent, events = sent + part, events + event
        except KilledError:
            pass
        monkeypatch.undo()
        left = AnswerSlot(memory, turn % 2).left()
        assert (left.state, left.record, left.num_before, left.num_read) == (ANSWERING, b"record", 7, 9)
        # The part at which the gateway was killed is counted whole, or not at all.
        events = dict(seen)[left.total]
        sent = b"".join(map(framed, pieces(seen, left.total)))
        again = AnswerSlot(memory, turn % 2)
        again.continue_from(left)
        taken = bytes(connection.taken)
        assert taken + again.rest(left, len(taken)) == sent
        assert left.counters == (len(events), zlib.adler32(events) if has_checksums else NO_CHECKSUM)
        assert events.endswith(left.newest)
        assert again.put(b"more", len(sent) - len(taken))
        left = AnswerSlot(memory, turn % 2).left()
        assert taken + again.rest(left, len(taken)) == sent + b"more"
    assert bool(num_small) is (size <= SMALL_BYTES and not has_checksums) or size > SMALL_BYTES


def pieces(seen: list[tuple[int, bytes]], total: int) -> list[bytes]:
    """Return the events of each part until the answer has so many bytes."""
    whole = [events for end, events in seen if end <= total]
    return [after[len(before) :] for before, after in pairwise(whole)]


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
    slot.begin(b"secret" * 50, 1, num_before=0, num_read=0, has_checksums=False)
    slot.put(b"head", 0)
    connection.take(4)
    written(slot, connection, b"secret")
    assert slot.left().total == slot.total == 4 + len(framed(b"secret"))
    slot.note(FINAL)
    slot.put(b"secret" * size, 0)
    assert slot.left().flags == FINAL
    slot.idle(77)
    assert (slot.left().state, slot.left().num_read) == (IDLE, 77)
    assert b"secret" not in memory[:]
    slot.clear()
    assert slot.left().state == EMPTY


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
