"""From a caller's arguments to a `Job`, with errors that name the argument at fault and its limit."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import uuid_utils
from pydantic import ValidationError

from penstock.contract.adapters import AdapterRef
from penstock.contract.errors import NotFoundError, RequestError, UnavailableError
from penstock.contract.job import MAX_DEADLINE_S, Job, Message, Priority, SamplingParams, pool_of
from penstock.contract.packed_prompt import PackedPrompt
from penstock.contract.problems import request_error
from penstock.contract.sampling_options import SamplingOptions
from penstock.contract.terms import Terms
from penstock.contract.tools import ToolChoice
from penstock.producer.client.tool_use import with_choice
from penstock.queue.broker.producer import ServedPool
from penstock.queue.prompts import pack_prompt
from penstock.queue.wire import PoolRecord

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any] | Message] | PackedPrompt
"""Text, token ids, the messages of a chat, or any of these as `pack_prompt_of` packs them."""


class SubmitOptions(SamplingOptions, total=False):
    """Keyword arguments of `submit`: how a job is queued, and every field of `SamplingParams`.

    model: a served model, pool or alias, or an adapter of one; not needed where only one model is served.
    adapter: one of the model's LoRA adapters; naming it as the model does the same.
    params: all of the sampling at once, in place of the single arguments.
    priority: the job's class.
    deadline_s: the job expires when it is not done by then.
    not_before_s: the job waits for so long before it stands in line.
    channel: publish each chunk on the job's own channel too, for any Redis client.
    background: go on when nobody reads; otherwise the job is cancelled soon after its last reader has gone.
    idempotency_key: a later submission with the same key and request is the same job.
    job_id: `<pool>.<uuidv7>`; minted by the client unless given.
    tools: what the assistant of a chat may call, in OpenAI's form; calls come as the model writes them.
    tool_choice: `auto`: the model decides; otherwise the text is made of calls alone, of any function or of one.
    parallel_tool_calls: whether a text that is kept to calls may have several.
    tenant: the tenant that the job belongs to; the client's own by default.
    terms: the tenant's limits and weight; without limits, and of the client's weight, by default.
    """

    model: str | None
    adapter: str | None
    params: SamplingParams | None
    priority: Priority
    deadline_s: float | None
    not_before_s: float | None
    channel: bool
    background: bool
    idempotency_key: str | None
    job_id: str | None
    tools: Sequence[Mapping[str, Any]] | str | None
    tool_choice: ToolChoice
    parallel_tool_calls: bool
    tenant: str | None
    terms: Terms | None


_OF_JOB = frozenset({"priority", "background", "idempotency_key", "tools"})
_ELSEWHERE = frozenset(
    {"model", "adapter", "params", "deadline_s", "not_before_s", "channel", "job_id", "tenant", "terms"}
    | {"tool_choice", "parallel_tool_calls"}
)
_ANY_ID = "any.00000000-0000-7000-8000-000000000000"
_ARGUMENT_OF = {"id": "job_id", "prompt_token_ids": "prompt", "deadline_ms": "deadline_s"}
"""Fields of a job that callers know by another name."""


def choose_pool(
    pools: Iterable[ServedPool], model: str | None, job_id: str | None = None, *, adapter: str | None = None
) -> ServedPool:
    """The pool that serves `model` (one of its shards by lot, or the one a job id names) or an adapter of that name;
    without a model, the only one there is.

    A pool without a live node is chosen where no other fits: it may be back in a moment, and is not unknown.
    """
    fitting = list(pools)
    if not fitting:
        raise UnavailableError("no model is served at the moment", code="no_node")
    shown = _live_or_all(fitting)
    names = ", ".join(sorted({pool.model for pool in shown}.union(*(pool.adapters for pool in shown))))
    if job_id is not None:
        fitting = [p for p in fitting if p.pool == pool_of(job_id)]
        if not fitting:
            raise NotFoundError(f"job_id {job_id!r} names no served pool", code="model_not_found", param="job_id")
    if model is not None:
        fitting = [p for p in fitting if model in names_of(p)] or [p for p in fitting if model in p.adapters]
    if not fitting:
        raise NotFoundError(f"model {model!r} is not served; served: {names}", code="model_not_found", param="model")
    if adapter is not None:
        fitting = _with_adapter(fitting, adapter)
    served = _live_or_all(fitting)
    if model is None and len({pool.model for pool in served}) > 1:
        raise RequestError(f"model must be named; served: {names}", param="model")
    return random.choice(served)


def _live_or_all(pools: list[ServedPool]) -> list[ServedPool]:
    """The pools with a live node, or all where none has one."""
    return [pool for pool in pools if pool.is_alive] or pools


def names_of(pool: PoolRecord) -> tuple[str, ...]:
    """What a pool's model may be called."""
    return pool.pool, pool.model, *pool.aliases


def _with_adapter(pools: list[ServedPool], adapter: str) -> list[ServedPool]:
    fitting = [pool for pool in pools if adapter in pool.adapters]
    if not fitting:
        names = ", ".join(sorted({name for pool in _live_or_all(pools) for name in pool.adapters})) or "none"
        message = f"adapter {adapter!r} is not served; served: {names}"
        raise NotFoundError(message, code="model_not_found", param="adapter")
    return fitting


def build_job(prompt: Prompt, options: SubmitOptions, record: PoolRecord, tenant: str) -> Job:
    """A checked job for a pool; raises RequestError naming the argument at fault."""
    of_job = {name: value for name, value in options.items() if name in _OF_JOB}
    sampling = {name: value for name, value in options.items() if name not in _OF_JOB | _ELSEWHERE}
    try:
        job = Job(
            id=options.get("job_id") or f"{record.pool}.{uuid_utils.uuid7()}",
            adapter=_adapter_of(options, record),
            tenant=options.get("tenant") or tenant,
            params=_sampling_params(options.get("params"), sampling),
            deadline_ms=_duration_ms(options.get("deadline_s"), "deadline_s"),
            not_before_ms=_not_before_ms(options),
            **_prompt_field(prompt),
            **of_job,
        )
    except ValidationError as error:
        raise request_error(error, _ARGUMENT_OF) from error
    choice, parallel = options.get("tool_choice", "auto"), options.get("parallel_tool_calls", True)
    return with_choice(job, choice, parallel=parallel, record=record)


def pack_prompt_of(prompt: Prompt) -> PackedPrompt:
    """A prompt that is checked as a job's is, and packed; raises RequestError naming what is wrong."""
    try:
        return pack_prompt(Job(id=_ANY_ID, **_prompt_field(prompt)))
    except ValidationError as error:
        raise request_error(error, _ARGUMENT_OF) from error


def _adapter_of(options: SubmitOptions, record: PoolRecord) -> AdapterRef | None:
    """The adapter that is named, as the model or beside it; its digest sees to it that all nodes use the same one."""
    model, name = options.get("model"), options.get("adapter")
    as_model = model if model is not None and model not in names_of(record) else None
    if name is not None and as_model not in (None, name):
        raise RequestError(f"model {as_model!r} is an adapter, and adapter names another one", param="adapter")
    name = name or as_model
    return None if name is None else AdapterRef(name=name, digest=record.adapters[name])


def _prompt_field(prompt: Prompt) -> dict[str, Any]:
    if isinstance(prompt, PackedPrompt):
        return {"packed_prompt": prompt}
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if not isinstance(prompt, Sequence) or isinstance(prompt, (bytes, bytearray)):
        raise RequestError("prompt must be text, a sequence of token ids or a sequence of messages", param="prompt")
    if not prompt:
        raise RequestError("prompt must not be empty", param="prompt")
    if isinstance(prompt[0], str):
        raise RequestError("prompt must be one text: each of several is a job of its own", param="prompt")
    if isinstance(prompt[0], (Mapping, Message)):
        return {"messages": tuple(prompt)}
    return {"prompt_token_ids": tuple(prompt)}


def _sampling_params(params: SamplingParams | None, sampling: Mapping[str, Any]) -> SamplingParams:
    if params is None:
        return SamplingParams(**sampling)
    if sampling:
        name = next(iter(sampling))
        raise RequestError(f"{name}: give sampling as params or as single arguments, not both", param=name)
    return params


def _not_before_ms(options: SubmitOptions) -> int | None:
    not_before_s, deadline_s = options.get("not_before_s"), options.get("deadline_s")
    if not not_before_s:
        return None
    not_before_ms = _duration_ms(not_before_s, "not_before_s")
    if deadline_s is not None and not_before_s >= deadline_s:
        message = f"not_before_s ({not_before_s}) must lie before deadline_s ({deadline_s})"
        raise RequestError(message, param="not_before_s")
    return not_before_ms


def _duration_ms(duration_s: float | None, name: str) -> int | None:
    if duration_s is None:
        return None
    if not isinstance(duration_s, (int, float)) or not 0 < duration_s <= MAX_DEADLINE_S:
        raise RequestError(f"{name} must be above 0 and at most {MAX_DEADLINE_S} seconds", param=name)
    return math.ceil(1000 * duration_s)
