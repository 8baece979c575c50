"""msgpack encoding and decoding of requests, pool records and node records.

Decoders ignore unknown keys; `msgpack_codec.py` defines the limits that they enforce.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from penstock.contract.errors import UnsupportedKindError
from penstock.contract.job import JobDef
from penstock.contract.job import Request as Request
from penstock.contract.pool import NodePressure, PoolEntry, PoolRecord
from penstock.contract.problems import problem_of
from penstock.contract.tasks import GENERATE, KINDS, Task
from penstock.contract.tools import few_calls
from penstock.queue.keys import PROTOCOL_VERSION
from penstock.queue.msgpack_codec import WireError, checked_map, pack, unpack_all

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
    """Decode a job's request. Raises WireError for a malformed one, and UnsupportedKindError for an unknown kind."""
    m = unpack_map(data)
    if not isinstance(kind := m.get("kind"), str):
        raise WireError(f"the kind of a job is a {type(kind).__name__}")
    if kind not in KINDS:
        raise UnsupportedKindError(f"this node does not know jobs of kind {kind[:64]!r}; upgrade it")
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
        raise WireError(f"not a request: {problem_of(error)}") from error
    except ValueError as error:
        raise WireError(f"not a request: messages: {error}") from error


# Records of pools and nodes.


def encode_record(record: PoolRecord | NodePressure) -> bytes:
    """Encode a pool record or a node's pressure record."""
    return pack({"v": PROTOCOL_VERSION, **asdict(record)})


_pool_adapter = TypeAdapter(PoolRecord)
_pressure_adapter = TypeAdapter(NodePressure)


def decode_pool(data: bytes) -> PoolRecord:
    """Decode a pool record. Raises WireError."""
    return _decode_record(_pool_adapter, unpack_map(data))


def encode_entry(entry: PoolEntry) -> bytes:
    """Encode a pool's entry. Another protocol version reads it as a pool record, and so learns this one's version."""
    return pack({"v": PROTOCOL_VERSION, "model": entry.pool, **asdict(entry)})


_entry_adapter = TypeAdapter(PoolEntry)


def decode_entry(pool: str, data: bytes) -> PoolEntry:
    """Decode a pool's entry. Raises WireError, also for the entry of another pool."""
    entry = _decode_record(_entry_adapter, unpack_map(data))
    if entry.pool != pool:
        raise WireError(f"the entry names pool {entry.pool[:64]!r}")
    return entry


def decode_pool_of_any_version(data: bytes) -> tuple[PoolRecord, int]:
    """Decode a pool record of any protocol version, and return its version. Raises WireError."""
    m = unpack_map(data, of_any_version=True)
    return _decode_record(_pool_adapter, m), m["v"]


def decode_pressure(data: bytes) -> NodePressure:
    """Decode a node's pressure record. Raises WireError."""
    return _decode_record(_pressure_adapter, unpack_map(data))


def _decode_record(adapter: TypeAdapter[R], m: dict[str, Any]) -> R:
    try:
        return adapter.validate_python(m)
    except ValidationError as error:
        raise WireError(f"not a record: {problem_of(error)}") from error
