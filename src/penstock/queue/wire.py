"""msgpack bytes of what goes through Redis, within limits: requests, chunks, pool records and node records."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar, cast

import msgpack
from pydantic import BaseModel, TypeAdapter, ValidationError

from penstock.contract.errors import InvariantError, PenstockError, UnsupportedKindError
from penstock.contract.fields import UNKNOWN_FIELD
from penstock.contract.job import JobDef
from penstock.contract.job import Request as Request
from penstock.contract.output import TERMINAL_STATES, Chunk, Outcome, PrefillProgress, TokenLogprobs, Usage
from penstock.contract.pool import NodePressure, PoolEntry, PoolRecord
from penstock.contract.problems import problem_of
from penstock.contract.tasks import GENERATE, KINDS, Task
from penstock.contract.tools import few_calls
from penstock.queue.protocol_version import PROTOCOL_VERSION

# Values as msgpack, encoded and decoded with limits: extension types and large or deeply nested values are refused.

MAX_BYTES = 16 << 20
MAX_DEPTH = 8


class WireError(PenstockError):
    """Bytes on the wire are malformed, of another version, or above a limit."""

    code = "bad_wire_data"


Pack = Callable[[Any], bytes]


PACK_BYTES = 4096
"""The first size of the buffer of one call. msgpack's own, 256 KiB, comes from the system each time."""
pack: Pack = partial(msgpack.packb, use_bin_type=True, buf_size=PACK_BYTES)
"""Returns the msgpack bytes of a value."""


def new_pack() -> Pack:
    """Return a `pack` that reuses its buffer, which saves most of the time for small values. For one thread only."""
    return cast(Pack, msgpack.Packer(use_bin_type=True).pack)


def array_header(num_items: int) -> bytes:
    """Return the msgpack header of an array with this number of items."""
    if num_items < 16:
        return bytes((0x90 | num_items,))
    return struct.pack(">BH", 0xDC, num_items) if num_items < 1 << 16 else struct.pack(">BI", 0xDD, num_items)


def binary(data: bytes | bytearray) -> tuple[bytes, bytes | bytearray]:
    """Return the header and the data of a msgpack byte string. `pack` would copy it into a buffer that grows."""
    size = len(data)
    if size < 1 << 16:
        return struct.pack(">BB", 0xC4, size) if size < 1 << 8 else struct.pack(">BH", 0xC5, size), data
    return struct.pack(">BI", 0xC6, size), data


def with_members(packed_map: bytes, members: Sequence[tuple[str, Iterable[bytes | bytearray]]]) -> bytes:
    """Return a packed map with members appended, each a name and the parts of its packed value.

    The bytes are copied once, since a value may have megabytes. The map must end up with at most 15 members.
    """
    if not 0x80 <= packed_map[0] <= 0x8F - len(members):
        raise InvariantError("the map would have more than 15 members, the most that a one-byte header can count")
    parts: list[bytes | bytearray | memoryview] = [bytes((packed_map[0] + len(members),)), memoryview(packed_map)[1:]]
    for name, value in members:
        parts.append(pack(name))
        parts.extend(value)
    return b"".join(parts)


def unpack_all(data: bytes) -> list[Any]:
    """Decode all values that are concatenated in `data`. Raises WireError."""
    unpacker = _unpacker(data)
    values: list[Any] = []
    end, tell, skip, unpack, keep = len(data), unpacker.tell, unpacker.skip, unpacker.unpack, values.append
    try:
        # First skip over all values without building them: unpack would allocate a list at the length that it claims.
        while tell() < end:
            skip()
        unpacker.feed(data)
        # Not list(unpacker): it silently drops an incomplete value at the end.
        while tell() < 2 * end:
            keep(unpack())
    except WireError:
        raise
    except Exception as error:  # msgpack raises many classes, ValueError and its own among them
        raise WireError(f"not msgpack: {type(error).__name__}: {error}") from error
    return values


def unpack_utf8(data: bytes) -> Any:
    """Decode one value. Texts stay UTF-8 bytes, names of members included, and `data` is not copied. Raises WireError.

    A decoded text takes up to four times its bytes.
    """
    if len(data) > MAX_BYTES:
        raise WireError(f"message of {len(data)} bytes exceeds {MAX_BYTES}")
    try:
        return msgpack.unpackb(data, raw=True, ext_hook=_refuse_ext)
    except WireError:
        raise
    except Exception as error:  # msgpack raises many classes
        raise WireError(f"not msgpack: {type(error).__name__}: {error}") from error


def checked_map(value: Any) -> dict[str, Any]:
    """Return `value` if it is a map within MAX_DEPTH. Raises WireError."""
    if not isinstance(value, dict):
        raise WireError(f"expected a msgpack map, found {type(value).__name__}")
    # Level by level: a call for each list or map would take twice as long.
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [
            item
            for one in level
            for item in (one.values() if type(one) is dict else one)
            if type(item) is list or type(item) is dict
        ]
        if not level:
            return value
    raise WireError(f"msgpack value is nested deeper than {MAX_DEPTH}")


def _unpacker(data: bytes) -> msgpack.Unpacker:
    if len(data) > MAX_BYTES:
        raise WireError(f"message of {len(data)} bytes exceeds {MAX_BYTES}")
    # The buffer's size also limits every length that the data declares.
    unpacker = msgpack.Unpacker(ext_hook=_refuse_ext, max_buffer_size=max(len(data), 1), max_ext_len=0)
    unpacker.feed(data)
    return unpacker


def _refuse_ext(code: int, data: bytes) -> Any:
    raise WireError(f"msgpack extension type {code} is not allowed")


# Requests.

CUSTOM_ID = ""
"""Name of the custom_id among a job's stored metadata. The caller's own names are not empty."""
R = TypeVar("R")


def unpack_map(data: bytes, *, of_any_version: bool = False) -> dict[str, Any]:
    """Decode the single map of a request, a result or a record. Raises WireError, also for another protocol version."""
    maps = [checked_map(value) for value in unpack_all(data)]
    if len(maps) != 1:
        raise WireError(f"expected one msgpack map, found {len(maps)}")
    if (v := maps[0].get("v")) != PROTOCOL_VERSION and not (of_any_version and type(v) is int):
        raise WireError(f"protocol version {v!r} is not {PROTOCOL_VERSION}")
    return maps[0]


_request_adapter = TypeAdapter(Request)
_OTHERWISE = {"prompt", "prompt_token_ids", "messages", "task", "params"}
"""Fields that have other names or types in the bytes than in a job."""
_MEMBERS = tuple(name for name in JobDef.model_fields if name in Request.__slots__ and name not in _OTHERWISE)
"""The members that a job and its request call alike, in the order of the bytes."""
_KNOWN = frozenset(("v", "kind", "prompt", "tokens", "messages", *_MEMBERS, "params", "options", "trace"))
_DEFAULTS = {name: JobDef.model_fields[name].default for name in _MEMBERS}
_task_adapter: TypeAdapter[Task] = TypeAdapter(Task)


def encode_request(job: JobDef) -> bytes:
    """Encode a job's request. The same job gives the same bytes, so their hash identifies the request."""
    head: dict[str, Any] = {"v": PROTOCOL_VERSION, "kind": job.kind}
    fields = dict(head)
    add_prompt(fields, job)
    given = job.model_fields_set
    for name, default in _DEFAULTS.items():
        if name in given and (value := getattr(job, name)) != default:
            fields[name] = value.model_dump() if isinstance(value, BaseModel) else value
    if job.task is None:
        fields["params"] = job.params.model_dump(exclude_defaults=True)
    else:
        fields["options"] = job.task.model_dump(exclude_defaults=True)
    if job.params.logit_bias:
        # Decoders accept only strings as map keys.
        fields["params"]["logit_bias"] = {str(token): added for token, added in job.params.logit_bias.items()}
    data = pack(fields)
    if (packed := job.packed_prompt) is None:
        return data
    # The packed prompt takes the place of the None that follows its name, the third one in the map.
    at = len(pack({**head, packed.form: None})) - 1
    return b"".join((memoryview(data)[:at], packed.data, memoryview(data)[at + 1 :]))


def add_prompt(fields: dict[str, Any], job: JobDef) -> None:
    """Add the one field of a request that holds the job's prompt; None stands for a packed prompt."""
    if job.packed_prompt is not None:
        fields[job.packed_prompt.form] = None
    elif job.prompt is not None:
        fields["prompt"] = job.prompt
    elif job.prompt_token_ids is not None:
        fields["tokens"] = job.prompt_token_ids
    else:
        fields["messages"] = [message.model_dump(exclude_defaults=True) for message in job.messages or ()]


def decode_request(data: bytes) -> Request:
    """Decode a job's request. Raises WireError for a malformed one.

    Raises UnsupportedKindError for a kind or a field that this release does not know. A field is not ignored, because
    the caller wants what it says.
    """
    m = unpack_map(data)
    if not isinstance(kind := m.get("kind"), str):
        raise WireError(f"the kind of a job is a {type(kind).__name__}")
    if kind not in KINDS:
        raise UnsupportedKindError(f"this node does not know jobs of kind {kind[:64]!r}; upgrade it")
    if unknown := m.keys() - _KNOWN:
        raise _unknown_field(str(min(unknown, key=str)))
    prompts = {"prompt": m.get("prompt"), "prompt_token_ids": m.get("tokens"), "messages": m.get("messages")}
    if sum(prompt is not None for prompt in prompts.values()) != 1:
        raise WireError("a request has exactly one prompt")
    try:
        few_calls(prompts["messages"])
        given = {name: m[name] for name in (*_MEMBERS, "params", "trace") if name in m}
        if kind != GENERATE:
            task = _task_adapter.validate_python({**checked_map(m.get("options")), "kind": kind})
            given |= {"params": task.sampling(), "task": task}
        return _request_adapter.validate_python(given | prompts)
    except ValidationError as error:
        problem = problem_of(error)
        if problem.code == UNKNOWN_FIELD:
            raise _unknown_field(problem.param or "") from error
        raise WireError(f"not a request: {problem}") from error
    except ValueError as error:
        raise WireError(f"not a request: messages: {error}") from error


def _unknown_field(name: str) -> UnsupportedKindError:
    return UnsupportedKindError(f"this node does not know the field {name[:64]!r} of a job; upgrade it")


# Records of pools and nodes.


def encode_record(record: PoolRecord | NodePressure) -> bytes:
    """Encode a pool record or a node's pressure record."""
    return pack({"v": PROTOCOL_VERSION, **asdict(record)})


_pool_adapter = TypeAdapter(PoolRecord)
_pressure_adapter = TypeAdapter(NodePressure)


def decode_pool(data: bytes) -> PoolRecord:
    """Decode a pool record. Raises WireError."""
    return _decode_record(_pool_adapter, unpack_map(data))


def decode_any_pool(data: bytes) -> tuple[PoolRecord, int]:
    """Decode a pool record, and its protocol version. Of another version only the names count. Raises WireError."""
    m = unpack_map(data, of_any_version=True)
    if (version := m["v"]) != PROTOCOL_VERSION:
        m = {name: m[name] for name in ("pool", "model", "aliases") if name in m}
    return _decode_record(_pool_adapter, m), version


def encode_entry(entry: PoolEntry) -> bytes:
    """Encode a pool's entry, which every protocol version can read."""
    return pack({"v": PROTOCOL_VERSION, **asdict(entry)})


_entry_adapter = TypeAdapter(PoolEntry)


def decode_entry(pool: str, data: bytes) -> PoolEntry:
    """Decode a pool's entry, of any protocol version. Raises WireError, also for what belongs to another pool."""
    entry = _decode_record(_entry_adapter, unpack_map(data, of_any_version=True))
    if entry.pool != pool:
        raise WireError(f"the entry names pool {entry.pool[:64]!r}")
    return entry


def decode_pressure(data: bytes) -> NodePressure:
    """Decode a node's pressure record. Raises WireError."""
    return _decode_record(_pressure_adapter, unpack_map(data))


def _decode_record(adapter: TypeAdapter[R], m: dict[str, Any]) -> R:
    try:
        return adapter.validate_python(m)
    except ValidationError as error:
        raise WireError(f"not a record: {problem_of(error)}") from error


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


def rows_of(entries: Sequence[TokenLogprobs], pack: Pack = pack) -> RowParts:
    """Pack log-probabilities into rows."""
    if not entries:
        return NO_ROWS
    return RowParts(len(entries), (pack(values_of_logprobs(entries))[len(array_header(len(entries))) :],))


def joined(parts: Sequence[RowParts]) -> RowParts:
    """Return the rows of all parts, in order, as one. It copies no bytes."""
    return RowParts(sum(part.num_rows for part in parts), tuple(data for part in parts for data in part.parts))


def values_of_logprobs(entries: Sequence[TokenLogprobs]) -> list[Any]:
    """Return the value to pack: per token its ids, its values as little-endian float32, and its texts."""
    return [[e.token_ids, struct.pack(f"<{len(e.values)}f", *e.values), e.tokens] for e in entries]


def logprobs_of(entries: Any, token_ids: Sequence[int] | None = None) -> tuple[TokenLogprobs, ...]:
    """Decode what `values_of_logprobs` returned. Raises WireError for malformed input.

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
        fields["u"] = chunk.usage.counts()
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
    state = fields["state"]
    if state not in TERMINAL_STATES:
        raise WireError(f"{state!r} is not a terminal state")
    return Outcome(cast(Any, state), fields.get("code", ""), fields.get("message", ""), fields.get("param", ""))


def _are_tokens(values: list[Any]) -> bool:
    # Nearly all chunks have one token, for which a generator would take four times as long.
    return type(values[0]) is int if len(values) == 1 else all(type(token) is int for token in values)


def chunk_of(value: Any) -> Chunk:
    """Decode one unpacked chunk. Raises WireError, KeyError or TypeError."""
    # Nearly all chunks have exactly these fields; checking for that first takes a third of the time.
    if type(value) is dict and [*value] == _PLAIN_KEYS and [*map(type, value.values())] == _PLAIN_TYPES:
        version, job_id, index, choice, position, token_ids, text = value.values()
        if version == PROTOCOL_VERSION and _are_tokens(token_ids):
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
        logprobs_of(m.get("l", []), m.get("t", ())),
        logprobs_of(m.get("q", [])),
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
"""Stands for the index."""


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
