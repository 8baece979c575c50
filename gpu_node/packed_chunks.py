"""Chunks as bytes of a job's log. Log-probabilities are packed once; the log and the result share these bytes.

A long prompt's log-probabilities are packed in parts, since all at once would block the event loop for tens of ms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.contract.output import PROMPT_TOKENS_PER_CHUNK, Chunk, TokenLogprobs
from penstock.queue import msgpack_codec, wire
from penstock.queue.chunks import NO_ROWS, Rows, joined, rows_of
from penstock.queue.msgpack_codec import Pack


class SealedChunk(NamedTuple):
    """A packed chunk, and the packed log-probabilities in it."""

    data: bytes
    rows: Rows = NO_ROWS
    prompt_rows: Rows = NO_ROWS


def seal(chunk: Chunk, pack: Pack = msgpack_codec.pack) -> SealedChunk:
    """Pack a chunk."""
    if not (chunk.logprobs or chunk.prompt_logprobs):
        return SealedChunk(wire.encode_chunk(chunk, pack))
    rows, prompt_rows = rows_of(chunk.logprobs, pack), rows_of(chunk.prompt_logprobs, pack)
    return SealedChunk(wire.encode_chunk(chunk, pack, rows, prompt_rows), rows, prompt_rows)


class PromptRows:
    """A prompt's log-probabilities: the packed ones in chunks, and the ones that no chunk has yet."""

    def __init__(self) -> None:
        self._packed: list[Rows] = []
        self._num_packed = 0
        self._pending: list[TokenLogprobs] = []

    def take(self, entries: Sequence[TokenLogprobs]) -> None:
        """Add the whole prompt's entries. Those that an earlier node has logged are skipped."""
        self._pending += entries[self._num_packed + len(self._pending) :]

    @property
    def is_pending(self) -> bool:
        """Whether entries wait for a chunk."""
        return bool(self._pending)

    def next_chunk(self, job_id: str, index: int) -> Chunk:
        """Return the next chunk of log-probabilities, at most `PROMPT_TOKENS_PER_CHUNK` of them."""
        entries = tuple(self._pending[:PROMPT_TOKENS_PER_CHUNK])
        del self._pending[: len(entries)]
        return Chunk(job_id, index, position=self._num_packed, prompt_logprobs=entries)

    def note(self, rows: Rows) -> None:
        """Keep a chunk's packed prompt log-probabilities, if it has any."""
        if rows.num_rows:
            self._packed.append(rows)
            self._num_packed += rows.num_rows

    @property
    def packed(self) -> Rows:
        """The packed log-probabilities of all chunks."""
        return joined(self._packed)
