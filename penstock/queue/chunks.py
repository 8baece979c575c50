"""msgpack encoding of what a running job publishes: chunks with log-probabilities, and the progress of its prompt."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from penstock.contract.errors import InvariantError
from penstock.contract.output import TERMINAL_STATES, Chunk, Outcome, PrefillProgress, TokenLogprobs, Usage, state_of
from penstock.queue import wire
from penstock.queue.keys import PROTOCOL_VERSION
from penstock.queue.wire import Pack, WireError, array_header, checked_map, pack, unpack_all, with_members

# msgpack encoding and decoding of log-probabilities. It is compact, because a token may have 20 alternatives.


@dataclass(frozen=True, slots=True)
class RowParts:
    """Log-probabilities of several tokens: packed rows in parts, since those of a long prompt are several megabytes."""

    num_rows: int
    parts: tuple[bytes, ...]

    @property
    def array_parts(self) -> tuple[bytes, ...]:
        """The rows as a msgpack array, as in a chunk or a result, in parts to concatenate."""
        return (array_header(self.num_rows), *self.parts)


NO_ROWS = RowParts(0, ())


def rows_of(entries: Sequence[TokenLogprobs], pack: Pack = wire.pack) -> RowParts:
    """Pack log-probabilities into rows."""
    if not entries:
        return NO_ROWS
    return RowParts(len(entries), (pack(to_wire(entries))[len(array_header(len(entries))) :],))


def joined(parts: Sequence[RowParts]) -> RowParts:
    """Return the rows of all parts, in order, as one. It copies no bytes."""
    return RowParts(sum(part.num_rows for part in parts), tuple(data for part in parts for data in part.parts))


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


# Chunks have one-letter keys, because millions of them are written. The order of keys is fixed, and a golden test pins
# the bytes.


def encode_chunk(
    chunk: Chunk, pack: Pack = pack, rows: RowParts | None = None, prompt_rows: RowParts | None = None
) -> bytes:
    """Encode a chunk for the log and the channels. Terminal chunks are built by the scripts instead.

    `rows` and `prompt_rows` are the chunk's log-probabilities, if they are packed already.
    """
    if chunk.outcome is not None:
        raise InvariantError("terminal chunks are written by the scripts only")
    head = {"v": PROTOCOL_VERSION, "j": chunk.job_id, "i": chunk.index, "c": chunk.choice}
    fields: dict[str, Any] = {**head, "p": chunk.position, "t": chunk.token_ids, "s": chunk.text}
    if chunk.finish_reason is not None:
        fields["f"] = chunk.finish_reason
    if chunk.usage is not None:
        usage = chunk.usage
        fields["u"] = [usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens]
    if chunk.num_prompt_tokens is not None:
        fields["n"] = chunk.num_prompt_tokens
    data = pack(fields)
    if chunk.logprobs:
        data = with_members(data, [("l", (rows or rows_of(chunk.logprobs, pack)).array_parts)])
    if chunk.prompt_logprobs:
        data = with_members(data, [("q", (prompt_rows or rows_of(chunk.prompt_logprobs, pack)).array_parts)])
    return data


_PLAIN = {"v": int, "j": str, "i": int, "c": int, "p": int, "t": list, "s": str}
_PLAIN_KEYS, _PLAIN_TYPES = list(_PLAIN), list(_PLAIN.values())
_CHUNK_TYPES = {key: kind for key, kind in _PLAIN.items() if key != "v"}
_CHUNK_TYPES |= {"f": str, "u": list, "e": dict, "l": list, "q": list, "n": int}


def _outcome_of(fields: dict[str, Any]) -> Outcome:
    state = state_of(fields["state"], fields.get("code", ""))
    if state not in TERMINAL_STATES:
        raise WireError(f"{state!r} is not a terminal state")
    return Outcome(cast(Any, state), fields.get("code", ""), fields.get("message", ""), fields.get("param", ""))


def chunk_of(value: Any) -> Chunk:
    """Decode one unpacked chunk. Raises WireError, KeyError or TypeError."""
    # Nearly all chunks have exactly these fields; checking for that first takes a third of the time.
    if type(value) is dict and [*value] == _PLAIN_KEYS and [*map(type, value.values())] == _PLAIN_TYPES:
        version, job_id, index, choice, position, token_ids, text = value.values()
        if version == PROTOCOL_VERSION and all(type(token) is int for token in token_ids):
            return Chunk(job_id, index, choice, position, tuple(token_ids), text)
    # Log-probabilities skip the depth check, because decoding them checks each of their values.
    rows = {key: value[key] for key in ("l", "q") if key in value} if type(value) is dict else {}
    m = (
        checked_map({key: member for key, member in value.items() if key not in rows}) | rows
        if rows
        else checked_map(value)
    )
    if m.get("v") != PROTOCOL_VERSION:
        raise WireError(f"protocol version {m.get('v')!r} is not {PROTOCOL_VERSION}")
    for key, value in m.items():
        if type(value) is not _CHUNK_TYPES.get(key, type(value)):
            raise WireError(f"chunk field {key!r} is a {type(value).__name__}")
    usage, end = m.get("u"), m.get("e")
    return Chunk(
        m["j"],
        m["i"],
        m.get("c", 0),
        m.get("p", 0),
        tuple(m.get("t", ())),
        m.get("s", ""),
        m.get("f"),
        Usage(*usage) if usage else None,
        _outcome_of(end) if end else None,
        from_wire(m.get("l", []), m.get("t", ())),
        from_wire(m.get("q", [])),
        m.get("n"),
    )


def decode_chunks(data: bytes) -> list[Chunk]:
    """Decode the chunks of one channel message or log entry. Raises WireError."""
    try:
        return [chunk_of(value) for value in unpack_all(data)]
    except (KeyError, TypeError) as error:
        raise WireError(f"not a chunk: {error!r}") from error


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
