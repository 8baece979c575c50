"""msgpack encoding and decoding of requests, chunks, pool records and node records.

Chunks have one-letter keys, because millions of them are written. The order of keys is fixed, and a golden test pins
the bytes. Decoders ignore unknown keys; `msgpack_codec.py` defines the limits that they enforce.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from penstock.contract.adapters import AdapterRef
from penstock.contract.errors import InvariantError, UnsupportedKindError
from penstock.contract.job import Job, Message, SamplingParams, TokenId
from penstock.contract.named import problem_of
from penstock.contract.output import TERMINAL_STATES, Chunk, Outcome, Usage
from penstock.contract.pool import EngineLoad
from penstock.contract.tasks import GENERATE, KINDS, Task
from penstock.contract.tools import TemplateKwargs, Tools, few_calls
from penstock.queue import chunks
from penstock.queue.chunks import Rows, rows_of
from penstock.queue.keys import PROTOCOL_VERSION
from penstock.queue.msgpack_codec import Pack, WireError, checked_map, pack, unpack_all, with_members

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Request:
    """The request of a job, which a node needs to run it, and what it carries of a trace; stored in P:request:<id>."""

    params: SamplingParams
    prompt: str | None = None
    prompt_token_ids: tuple[TokenId, ...] | None = None
    messages: tuple[Message, ...] | None = None
    tools: Tools | None = None
    adapter: AdapterRef | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    task: Task | None = None
    max_total_tokens: int | None = None
    """The most tokens of prompt and output together, to which `params.max_tokens` is lowered."""
    return_progress: bool = False
    """Whether readers want to know how far the prompt is computed."""
    trace: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PoolRecord:
    """A served model as clients see it; stored in P:record.

    `max_token_bytes` is the length of the longest token's text, 0 if unknown. The parsers, and `thinking_switches`, say
    how to read the model's texts (`reasoning_parser_for`). `adapters` maps names to digests: those of the announcing
    node, or of all nodes in `ProducerBroker.pools`. `kinds` are the kinds of jobs that the announcing node knows.
    """

    pool: str
    model: str
    aliases: tuple[str, ...] = ()
    max_model_len: int = 0
    created_s: int = 0
    revision: str = ""
    max_token_bytes: int = 0
    tool_parser: str = "none"
    reasoning_parser: str = "none"
    adapters: dict[str, str] = field(default_factory=dict)
    kinds: tuple[str, ...] = (GENERATE,)
    thinking_switches: tuple[str, ...] = ()
    sampling_defaults: dict[str, int | float] = field(default_factory=dict)
    """The sampling of requests that do not set it, by the names of `SamplingParams`."""


@dataclass(frozen=True, slots=True)
class PoolEntry:
    """A pool's entry in penstock:pools: the names, beside its own, that its record may claim; None: all of them."""

    pool: str
    names: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class NodePressure(EngineLoad):
    """A node's pressure record: the load of its engine, its jobs and its speed. Admission and metrics read it."""

    node_id: str
    num_jobs: int = 0
    jobs_by_class: tuple[int, ...] = ()
    jobs_by_tenant: dict[str, int] = field(default_factory=dict)
    """Number of held jobs of the tenants with the most. `jobs_by_class` counts all jobs, most urgent class first."""
    max_num_seqs: int = 0
    kv_tokens_available: int = 0
    """KV tokens that taken jobs neither use now nor are expected to need later."""
    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0
    drain_cost_per_s: float = 0.0
    """Cost, in KV tokens, of the jobs that end per second; a moving average."""
    preemptions_per_s: float = 0.0
    num_steps: int = 0
    mean_batch: float = 0.0
    """Sequences per step, over the steps since the last record."""
    max_model_len: int = 0
    revision: str = ""
    draining: bool = False
    predicted_outputs: tuple[tuple[int, int, int], ...] = ()
    """(bit length of prompt tokens, bit length of max_tokens, output tokens that 9 of 10 such choices stay within)."""
    troubles: dict[str, str] = field(default_factory=dict)
    """Parts of the node that are unhealthy, or were so recently → the reason."""


@dataclass(frozen=True, slots=True)
class PoolPressure:
    """Input of admission: live nodes' pressure records, and per class the queued jobs and their cost in KV tokens."""

    nodes: tuple[NodePressure, ...] = ()
    backlog_cost: tuple[int, int, int] = field(default=(0, 0, 0))
    num_queued: tuple[int, int, int] = field(default=(0, 0, 0))


def unpack_map(data: bytes, *, of_any_version: bool = False) -> dict[str, Any]:
    """Decode the single map of a request, a result or a record. Raises WireError, also for another protocol version."""
    maps = [checked_map(value) for value in unpack_all(data)]
    if len(maps) != 1:
        raise WireError(f"expected one msgpack map, found {len(maps)}")
    if (v := maps[0].get("v")) != PROTOCOL_VERSION and not (of_any_version and type(v) is int):
        raise WireError(f"protocol version {v!r} is not {PROTOCOL_VERSION}")
    return maps[0]


# Chunks -----------------------------------------------------------------------------------------


def encode_chunk(chunk: Chunk, pack: Pack = pack, rows: Rows | None = None, prompt_rows: Rows | None = None) -> bytes:
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
    if fields["state"] not in TERMINAL_STATES:
        raise WireError(f"{fields['state']!r} is not a terminal state")
    return Outcome(fields["state"], fields.get("code", ""), fields.get("message", ""), fields.get("param", ""))


def chunk_of(value: Any) -> Chunk:
    """Decode one unpacked chunk. Raises WireError, KeyError or TypeError."""
    # Nearly all chunks have exactly these fields; checking for that first takes a third of the time.
    if type(value) is dict and [*value] == _PLAIN_KEYS and [*map(type, value.values())] == _PLAIN_TYPES:
        version, job_id, index, choice, position, token_ids, text = value.values()
        if version == PROTOCOL_VERSION and all(type(token) is int for token in token_ids):
            return Chunk(job_id, index, choice, position, tuple(token_ids), text)
    # Log-probabilities skip the depth check, because decoding them checks each of their values.
    rows = {key: value[key] for key in ("l", "q") if key in value} if type(value) is dict else {}
    m = checked_map({key: member for key, member in value.items() if key not in rows} if rows else value) | rows
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
        chunks.from_wire(m.get("l", []), m.get("t", ())),
        chunks.from_wire(m.get("q", [])),
        m.get("n"),
    )


def decode_chunks(data: bytes) -> list[Chunk]:
    """Decode the chunks of one channel message or log entry. Raises WireError."""
    try:
        return [chunk_of(value) for value in unpack_all(data)]
    except (KeyError, TypeError) as error:
        raise WireError(f"not a chunk: {error!r}") from error


# Requests ---------------------------------------------------------------------------------------

_request_adapter = TypeAdapter(Request)
_REQUEST_MEMBERS = (
    "params",
    "tools",
    "adapter",
    "chat_template_kwargs",
    "max_total_tokens",
    "return_progress",
    "trace",
)
_task_adapter: TypeAdapter[Task] = TypeAdapter(Task)


def encode_request(job: Job) -> bytes:
    """Encode a job's request. The same job gives the same bytes, so their hash identifies the request."""
    head: dict[str, Any] = {"v": PROTOCOL_VERSION, "kind": job.kind}
    fields = dict(head)
    add_prompt(fields, job)
    if job.tools is not None:
        fields["tools"] = job.tools
    if job.chat_template_kwargs is not None:
        fields["chat_template_kwargs"] = job.chat_template_kwargs
    if job.max_total_tokens is not None:
        fields["max_total_tokens"] = job.max_total_tokens
    if job.return_progress:
        fields["return_progress"] = True
    if job.adapter is not None:
        fields["adapter"] = job.adapter.model_dump()
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


def add_prompt(fields: dict[str, Any], job: Job) -> None:
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
        given = {name: m[name] for name in _REQUEST_MEMBERS if name in m}
        if kind != GENERATE:
            task = _task_adapter.validate_python({**checked_map(m.get("options")), "kind": kind})
            given |= {"params": task.sampling(), "task": task}
        return _request_adapter.validate_python(given | prompts)
    except ValidationError as error:
        raise WireError(f"not a request: {problem_of(error)}") from error
    except ValueError as error:
        raise WireError(f"not a request: messages: {error}") from error


# Records of pools and nodes ---------------------------------------------------------------------


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
