"""Emit calls of a node without an engine: the bytes that `NodeBroker.emit` would send, from parts made once per job.

Encoding each chunk by itself would cost the node more than Redis takes for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.queue.broker.scripts import packed
from penstock.queue.protocol_version import PROTOCOL_VERSION
from penstock.queue.wire import array_header, pack

FIRST_TOKEN = 1000
STAMP = "@@{at_ns}:{index};"
"""The text of a chunk begins with the time of its publication (time.monotonic_ns) and its index in the job's log."""


def text_of(at_ns: int, index: int, num_chars: int) -> str:
    """Return the text of one chunk, filled up to `num_chars`."""
    return STAMP.format(at_ns=at_ns, index=index).ljust(num_chars, ".")


@dataclass(frozen=True, slots=True)
class _Job:
    """The parts of a job's emission that never change: up to the index, and of its chunk up to the index there."""

    head: bytes
    chunk_head: bytes


class EmitCall:
    """The emissions of a few jobs, all with the next chunk of one token. The jobs' ids have the same length."""

    def __init__(self, jobs: Sequence[tuple[str, str]], next_index: int) -> None:
        """`jobs`: id and lease of each."""
        self.next_index = next_index
        self.num_jobs = len(jobs)
        self._jobs = [
            _Job(array_header(5) + packed(job_id) + packed(lease), _chunk_head(job_id)) for job_id, lease in jobs
        ]
        if len({len(job.chunk_head) for job in self._jobs}) != 1:
            raise ValueError("the ids of the jobs differ in length")

    def message(self, at_ns: int, num_chars: int) -> bytes:
        """Return the message that the call would publish to one reading process, and advance to the next chunk."""
        chunk_tail = self._chunk_tail(at_ns, num_chars)
        self.next_index += 1
        return b"".join([part for job in self._jobs for part in (job.chunk_head, chunk_tail)])

    def rows(self, at_ns: int, num_chars: int) -> bytes:
        """Return the packed rows of the call, and advance to the next chunk."""
        index, chunk_tail = self.next_index, self._chunk_tail(at_ns, num_chars)
        size = len(self._jobs[0].chunk_head) + len(chunk_tail)
        middle = pack(index) + array_header(1) + _string_header(size)
        parts, no_progress = [array_header(self.num_jobs)], packed("")
        for job in self._jobs:
            parts += (job.head, middle, job.chunk_head, chunk_tail, no_progress)
        self.next_index += 1
        return b"".join(parts)

    def _chunk_tail(self, at_ns: int, num_chars: int) -> bytes:
        index = self.next_index
        fields = {"i": index, "c": 0, "p": index, "t": [FIRST_TOKEN + index], "s": text_of(at_ns, index, num_chars)}
        # Without the one-byte header of a map: its members follow those of the chunk's head.
        return pack(fields)[1:]


def _chunk_head(job_id: str) -> bytes:
    """Return the header of a map of seven members, and the first two."""
    return b"\x87" + pack({"v": PROTOCOL_VERSION, "j": job_id})[1:]


def _string_header(size: int) -> bytes:
    """Return the msgpack header of a string, the only type that Redis's Lua has for bytes."""
    return packed(bytes(size))[:-size]
