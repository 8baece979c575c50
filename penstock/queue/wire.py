"""Records as msgpack, in and out.

Maps have one-letter keys because a token chunk is written millions of times; the order of keys is fixed, and a golden
test pins the bytes. Decoders ignore unknown keys; what they refuse stands in `packing.py`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError

from penstock.contract.adapters import AdapterRef
from penstock.contract.errors import InvariantError
from penstock.contract.job import TERMINAL_STATES, Chunk, Job, Message, Outcome, SamplingParams, TokenId, Usage
from penstock.contract.problems import problem_of
from penstock.contract.tools import Tools, few_calls
from penstock.queue import packed_logprobs
from penstock.queue.msgpack_codec import Pack, WireError, checked_map, pack, unpack_all, with_member
from penstock.queue.packed_logprobs import Rows, rows_of
from penstock.queue.prompts import prompt_fields

VERSION = 1


@dataclass(frozen=True, slots=True)
class Request:
    """What a node needs to run a job: P:in:<id>."""

    params: SamplingParams
    prompt: str | None = None
    prompt_token_ids: tuple[TokenId, ...] | None = None
    messages: tuple[Message, ...] | None = None
    tools: Tools | None = None
    adapter: AdapterRef | None = None


@dataclass(frozen=True, slots=True)
class PoolRecord:
    """A served model as clients see it: penstock:pools. `max_token_bytes`: most text of one token, 0 where unknown.

    The parsers say in what form the model writes tool calls and reasoning (`tools.py`). `adapters`: name → digest, of
    the node that says so, and for who asks what is served of all of them.
    """

    pool: str
    model: str
    aliases: tuple[str, ...] = ()
    max_model_len: int = 0
    bytes_per_token: float = 3.0
    created_s: int = 0
    revision: str = ""
    max_token_bytes: int = 0
    tool_parser: str = "none"
    reasoning_parser: str = "none"
    adapters: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NodePressure:
    """One node's record: KV blocks, sequences and pace. Admission, dashboards and metrics all read this one."""

    node_id: str
    block_size: int = 16
    kv_blocks_total: int = 0
    kv_blocks_free: int = 0
    kv_blocks_cached: int = 0
    kv_tokens_used: int = 0
    """Tokens stored in blocks that somebody holds; the rest of these is what blocks waste."""
    num_running: int = 0
    num_waiting: int = 0
    num_jobs: int = 0
    max_num_seqs: int = 0
    kv_tokens_unclaimed: int = 0
    """KV tokens neither used nor still needed by jobs already taken."""
    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0
    drain_cost_per_s: float = 0.0
    """Cost (KV tokens) of jobs that ended per second, a moving average."""
    step_ms_p50: float = 0.0
    step_ms_p99: float = 0.0
    num_preemptions: int = 0
    preemptions_per_s: float = 0.0
    num_swaps: int = 0
    """Preemptions whose blocks were copied to the host; the others were computed again."""
    num_swapped: int = 0
    """Sequences whose blocks are there now."""
    swap_blocks_total: int = 0
    swap_blocks_free: int = 0
    swap_blocks_cached: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0
    kv_evictions: int = 0
    """Cached prefix blocks that the device gave away, to the host where that had room."""
    swap_evictions: int = 0
    prefix_lookup_tokens: int = 0
    prefix_hit_tokens: int = 0
    """Of these, tokens found computed, on both tiers."""
    swap_hit_tokens: int = 0
    """Of these, tokens that the host had."""
    drafted_tokens: int = 0
    """Tokens computed ahead because a sequence would probably say them,"""
    accepted_tokens: int = 0
    """and those of them that it said."""
    num_failed_steps: int = 0
    num_memory_failures: int = 0
    max_step_tokens: int = 0
    """Most tokens that a step may have: fewer than usual after one that found no memory."""
    num_steps: int = 0
    mean_batch: float = 0.0
    """Sequences per step, over the steps since the last record."""
    max_model_len: int = 0
    revision: str = ""
    draining: bool = False
    predicted_outputs: tuple[tuple[int, int, int], ...] = ()
    """(bits of the prompt's tokens, bits of max_tokens, tokens that a choice of this kind will probably not exceed)."""
    troubles: dict[str, str] = field(default_factory=dict)
    """Parts of the node that are not well, or were not lately, and why."""


@dataclass(frozen=True, slots=True)
class PoolPressure:
    """Admission's input: every live node's record and the queued cost per class."""

    nodes: tuple[NodePressure, ...] = ()
    backlog_cost: tuple[int, int, int] = field(default=(0, 0, 0))


def unpack_map(data: bytes) -> dict[str, Any]:
    """The one map of a request, a result or a record, of this version of the protocol; raises WireError."""
    maps = [checked_map(value) for value in unpack_all(data)]
    if len(maps) != 1:
        raise WireError(f"expected one msgpack map, found {len(maps)}")
    if maps[0].get("v") != VERSION:
        raise WireError(f"protocol version {maps[0].get('v')!r} is not {VERSION}")
    return maps[0]


# Chunks -----------------------------------------------------------------------------------------


def encode_chunk(chunk: Chunk, pack: Pack = pack, rows: Rows | None = None, prompt_rows: Rows | None = None) -> bytes:
    """The bytes of a chunk in the log and on the channels; terminal chunks are built by the scripts.

    `rows` and `prompt_rows` are its log-probabilities where they are packed already.
    """
    if chunk.outcome is not None:
        raise InvariantError("terminal chunks are written by the scripts only")
    head = {"v": VERSION, "j": chunk.job_id, "i": chunk.index, "c": chunk.choice}
    fields: dict[str, Any] = {**head, "p": chunk.position, "t": chunk.token_ids, "s": chunk.text}
    if chunk.finish_reason is not None:
        fields["f"] = chunk.finish_reason
    if chunk.usage is not None:
        usage = chunk.usage
        fields["u"] = [usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens]
    data = pack(fields)
    if chunk.logprobs:
        data = with_member(data, "l", (rows or rows_of(chunk.logprobs, pack)).array)
    if chunk.prompt_logprobs:
        data = with_member(data, "q", (prompt_rows or rows_of(chunk.prompt_logprobs, pack)).array)
    return data


_PLAIN = {"v": int, "j": str, "i": int, "c": int, "p": int, "t": list, "s": str}
_PLAIN_KEYS, _PLAIN_TYPES = list(_PLAIN), list(_PLAIN.values())
_CHUNK_TYPES = {
    "j": str,
    "i": int,
    "c": int,
    "p": int,
    "t": list,
    "s": str,
    "f": str,
    "u": list,
    "e": dict,
    "l": list,
    "q": list,
}


def _outcome_of(fields: dict[str, Any]) -> Outcome:
    if fields["state"] not in TERMINAL_STATES:
        raise WireError(f"{fields['state']!r} is not a terminal state")
    return Outcome(fields["state"], fields.get("code", ""), fields.get("message", ""), fields.get("param", ""))


def _chunk_of(value: Any) -> Chunk:
    # Nearly all are of this form, which takes a third of the time to recognise.
    if type(value) is dict and [*value] == _PLAIN_KEYS and [*map(type, value.values())] == _PLAIN_TYPES:
        version, job_id, index, choice, position, token_ids, text = value.values()
        if version == VERSION and all(type(token) is int for token in token_ids):
            return Chunk(job_id, index, choice, position, tuple(token_ids), text)
    # Decoding log-probabilities looks at each of their values, so that their depth needs no look of its own.
    likely = {key: value[key] for key in ("l", "q") if key in value} if type(value) is dict else {}
    m = checked_map({key: member for key, member in value.items() if key not in likely} if likely else value) | likely
    if m.get("v") != VERSION:
        raise WireError(f"protocol version {m.get('v')!r} is not {VERSION}")
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
        packed_logprobs.from_wire(m.get("l", []), m.get("t", ())),
        packed_logprobs.from_wire(m.get("q", [])),
    )


def decode_chunks(data: bytes) -> list[Chunk]:
    """The chunks of one channel message or log entry."""
    try:
        return [_chunk_of(value) for value in unpack_all(data)]
    except (KeyError, TypeError) as error:
        raise WireError(f"not a chunk: {error!r}") from error


# Requests ---------------------------------------------------------------------------------------

KIND = "generate"
_request_adapter = TypeAdapter(Request)


def encode_request(job: Job) -> bytes:
    """What a node needs of a job; the same job gives the same bytes, whose hash identifies the body."""
    head: dict[str, Any] = {"v": VERSION, "kind": KIND}
    extras = {"tools": job.tools, "adapter": job.adapter and job.adapter.model_dump()}
    tail = {name: value for name, value in extras.items() if value is not None}
    params = job.params.model_dump(exclude_defaults=True)
    if "logit_bias" in params:
        # Maps have no keys but texts.
        params["logit_bias"] = {str(token): added for token, added in params["logit_bias"].items()}
    tail["params"] = params
    packed = job.packed_prompt
    if packed is None:
        return pack(head | prompt_fields(job) | tail)
    # A map of fewer than 16 members begins with one byte, which counts them.
    num_members = len(head) + 1 + len(tail)
    return b"".join((bytes((0x80 | num_members,)), pack(head)[1:], pack(packed.form), packed.data, pack(tail)[1:]))


def decode_request(data: bytes) -> Request:
    """The request of a job; raises WireError when it is not one."""
    m = unpack_map(data)
    if m.get("kind") != KIND:
        raise WireError(f"jobs of kind {m.get('kind')!r} are not known here")
    prompts = {"prompt": m.get("prompt"), "prompt_token_ids": m.get("tokens"), "messages": m.get("messages")}
    if sum(prompt is not None for prompt in prompts.values()) != 1:
        raise WireError("a request has exactly one prompt")
    try:
        few_calls(prompts["messages"])
        given = {name: m.get(name) for name in ("params", "tools", "adapter")}
        return _request_adapter.validate_python(given | prompts)
    except ValidationError as error:
        raise WireError(f"not a request: {problem_of(error)}") from error
    except ValueError as error:
        raise WireError(f"not a request: messages: {error}") from error


# Records of pools and nodes ---------------------------------------------------------------------


def encode_record(record: PoolRecord | NodePressure) -> bytes:
    """A pool's or node's record."""
    return pack({"v": VERSION, **asdict(record)})


_pool_adapter = TypeAdapter(PoolRecord)
_pressure_adapter = TypeAdapter(NodePressure)


def decode_pool(data: bytes) -> PoolRecord:
    """A pool's record; raises WireError."""
    return cast(PoolRecord, _decode_record(_pool_adapter, data))


def decode_pressure(data: bytes) -> NodePressure:
    """A node's record; raises WireError."""
    return cast(NodePressure, _decode_record(_pressure_adapter, data))


def _decode_record(adapter: TypeAdapter[Any], data: bytes) -> Any:
    try:
        return adapter.validate_python(unpack_map(data))
    except ValidationError as error:
        raise WireError(f"not a record: {problem_of(error)}") from error
