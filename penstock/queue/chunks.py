"""msgpack encoding of what a running job publishes: chunks with log-probabilities, and the progress of its prompt."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.contract.output import Chunk, PrefillProgress, TokenLogprobs
from penstock.queue import msgpack_codec
from penstock.queue.keys import PROTOCOL_VERSION
from penstock.queue.msgpack_codec import Pack, WireError, array_header, checked_map, pack, unpack_all
from penstock.queue.wire import chunk_of

# msgpack encoding and decoding of log-probabilities. It is compact, because a token may have 20 alternatives.


@dataclass(frozen=True, slots=True)
class Rows:
    """Log-probabilities of several tokens: packed rows in parts, since those of a long prompt are several megabytes."""

    num_rows: int
    parts: tuple[bytes, ...]

    @property
    def array_parts(self) -> tuple[bytes, ...]:
        """The rows as a msgpack array, as in a chunk or a result, in parts to concatenate."""
        return (array_header(self.num_rows), *self.parts)


NO_ROWS = Rows(0, ())


def rows_of(entries: Sequence[TokenLogprobs], pack: Pack = msgpack_codec.pack) -> Rows:
    """Pack log-probabilities into rows."""
    if not entries:
        return NO_ROWS
    return Rows(len(entries), (pack(to_wire(entries))[len(array_header(len(entries))) :],))


def joined(parts: Sequence[Rows]) -> Rows:
    """Return the rows of all parts, in order, as one. It copies no bytes."""
    return Rows(sum(part.num_rows for part in parts), tuple(data for part in parts for data in part.parts))


def to_wire(entries: Sequence[TokenLogprobs]) -> list[Any]:
    """Return the value to pack: per token its ids, its values as little-endian float32, and its texts."""
    return [[e.token_ids, struct.pack(f"<{len(e.values)}f", *e.values), e.tokens] for e in entries]


def from_wire(entries: Any, token_ids: Sequence[int] | None = None) -> tuple[TokenLogprobs, ...]:
    """Decode what `to_wire` returned. Raises WireError for malformed input.

    If `token_ids` is given and `entries` is not empty, both must have the same length.
    """
    if not isinstance(entries, list):
        raise WireError("log-probabilities are not a list")
    if entries and token_ids is not None and len(entries) != len(token_ids):
        raise WireError(f"log-probabilities of {len(entries)} tokens come with {len(token_ids)} tokens")
    return tuple(map(_entry_of, entries))


def _entry_of(entry: Any) -> TokenLogprobs:
    if not isinstance(entry, list) or [*map(type, entry)] != [list, bytes, list]:
        raise WireError("log-probabilities of a token must be a list of ids, values and texts")
    ids, packed, texts = entry
    counts = {len(ids), len(texts), len(packed) / 4} - ({0.0} if len(ids) == 1 else set())
    if counts != {len(ids)} or not ids:
        raise WireError("log-probabilities of a token have different numbers of ids, values and texts")
    if {*map(type, ids)} != {int} or not {*map(type, texts)} <= {bytes, str}:
        raise WireError("ids of log-probabilities must be integers, and texts bytes or strings")
    return TokenLogprobs(tuple(ids), struct.unpack(f"<{len(packed) // 4}f", packed), tuple(texts))


# Messages on the inbox of a reading process: chunks, and the progress of prompts that nodes compute.
#
# A progress message is published and stored nowhere. It has no index, so it changes no reader's position in a log.

_PROGRESS = "g"
_NO_INDEX = -1
"""Stands for the index. Readers of earlier releases take the message for a chunk that they already have."""


@dataclass(frozen=True, slots=True)
class ProgressMessage:
    """The progress of a job's prompt: how many of its tokens are computed."""

    job_id: str
    progress: PrefillProgress


def encode_progress(job_id: str, progress: PrefillProgress) -> bytes:
    """Encode a progress message."""
    numbers = [progress.total, progress.cached, progress.processed, progress.time_ms]
    return pack({"v": PROTOCOL_VERSION, "j": job_id, "i": _NO_INDEX, _PROGRESS: numbers})


def decode_message(data: bytes) -> tuple[list[Chunk], list[ProgressMessage]]:
    """Decode the chunks and the progress in a message on an inbox. Raises WireError."""
    values = unpack_all(data)
    try:
        chunks = [chunk_of(value) for value in values if _PROGRESS not in value]
        if len(chunks) == len(values):
            return chunks, []
        return chunks, [_progress_of(value) for value in values if _PROGRESS in value]
    except (KeyError, TypeError) as error:
        raise WireError(f"not a chunk: {error!r}") from error


def _progress_of(value: Any) -> ProgressMessage:
    fields = checked_map(value)
    if (version := fields.get("v")) != PROTOCOL_VERSION:
        raise WireError(f"protocol version {version!r} is not {PROTOCOL_VERSION}")
    numbers, job_id = fields[_PROGRESS], fields["j"]
    if type(job_id) is not str or type(numbers) is not list or [*map(type, numbers)] != [int] * 4:
        raise WireError("not a progress message")
    return ProgressMessage(job_id, PrefillProgress(*numbers))
