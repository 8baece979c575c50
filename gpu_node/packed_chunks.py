"""Chunks as they go into a job's log. Log-probabilities are packed once: the log and the result have the same bytes.

A long prompt's are packed a part at a time, because all of them would hold the event loop for tens of milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.contract.job import Chunk
from penstock.contract.logprobs import PROMPT_TOKENS_PER_CHUNK, TokenLogprobs
from penstock.queue import msgpack_codec, wire
from penstock.queue.msgpack_codec import Pack
from penstock.queue.packed_logprobs import NO_ROWS, Rows, joined, rows_of


class SealedChunk(NamedTuple):
    """A chunk's bytes, and those of its log-probabilities."""

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
    """A prompt's log-probabilities: those that chunks have, packed, and those that the engine gave since."""

    def __init__(self) -> None:
        self._packed: list[Rows] = []
        self._num_packed = 0
        self._pending: list[TokenLogprobs] = []

    def take(self, entries: Sequence[TokenLogprobs]) -> None:
        """Take in the whole prompt's; an earlier node may have logged the first of these."""
        self._pending += entries[self._num_packed + len(self._pending) :]

    @property
    def is_pending(self) -> bool:
        """Whether some are in no chunk yet."""
        return bool(self._pending)

    def next_chunk(self, job_id: str, index: int) -> Chunk:
        """The next of the chunks that they go into."""
        entries = tuple(self._pending[:PROMPT_TOKENS_PER_CHUNK])
        del self._pending[: len(entries)]
        return Chunk(job_id, index, position=self._num_packed, prompt_logprobs=entries)

    def note(self, rows: Rows) -> None:
        """Keep what a chunk has of them, if anything."""
        if rows.num_rows:
            self._packed.append(rows)
            self._num_packed += rows.num_rows

    @property
    def packed(self) -> Rows:
        """All that chunks have."""
        return joined(self._packed)
