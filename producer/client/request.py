"""Build a `JobDef` from a caller's arguments, and constrain its text as `tool_choice` asks.

Errors name the wrong argument and its limit.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast, get_args

import uuid_utils
from annotated_types import Ge, Gt, Le
from pydantic import ValidationError

from penstock.contract.adapters import AdapterRef
from penstock.contract.durations import seconds_of
from penstock.contract.errors import RequestError, TooLargeError, UnsupportedKindError
from penstock.contract.job import (
    DURATIONS,
    LATER_THAN_START,
    OPTIONS_OF_QUEUE,
    JobDef,
    JobKey,
    Message,
    PackedPrompt,
    QueueFields,
    SamplingParams,
    SubmitOptions,
)
from penstock.contract.job_actions import checked_class
from penstock.contract.pool import PoolRecord
from penstock.contract.priority import default_class
from penstock.contract.problems import problem_of, request_error
from penstock.contract.prompt import PromptField
from penstock.contract.sampling import StructuredOutputs
from penstock.contract.tasks import MAX_TASK_BYTES, MAX_TASK_TOKENS, TextTask
from penstock.contract.tools import (
    ReasoningParserName,
    ToolChoice,
    ToolUse,
    WantedCalls,
    WantedFunction,
    chosen_function,
    closed,
    narrowed,
    reasoning_parser_for,
)
from penstock.producer.client.pool_choice import names_of
from penstock.producer.client.reasoning import with_budget
from penstock.producer.parsing.parsed_text import PLAIN, AnswerFormat
from penstock.queue.broker.producer import ServedPool
from penstock.queue.broker.submitting import first_words
from penstock.queue.job_cost import call_bytes, num_prompt_ids, prompt_bytes, tool_bytes
from penstock.queue.wire import add_prompt, pack

# `tool_choice`: the text of a job is constrained to calls, and the calls to their functions' schemas.

_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_ANY_OBJECT = {"type": "object"}


def with_choice(job: JobDef, choice: ToolChoice, *, parallel: bool, record: PoolRecord) -> JobDef:
    """Return the job with its calls constrained.

    The job is unchanged if the model may write any text and no function is strict.
    `parallel` allows several calls; `record` names the model's call format. Raises RequestError that names `tools` or
    `tool_choice`.
    """
    job, choice = _narrowed(job, choice)
    name = _name_in(choice)
    is_forced = name is not None or choice == "required"
    if job.tools is None:
        if is_forced:
            raise RequestError("tool_choice: the request has no tools", param="tool_choice")
        return job
    if choice == "none":
        return job.model_copy(update={"tools": None})
    functions = _chosen(job.tools, name)
    output = job.params.structured_outputs
    # A job that is submitted again already has its constraints.
    is_constrained = output is not None and output.calls is not None
    if is_constrained or not _are_held(functions, output, is_forced=is_forced):
        return job
    answer = None if output is None else _answer_of(output, record, is_forced=is_forced)
    calls = WantedCalls(
        **_formats_of(record, job),
        functions=tuple(_wanted(one, as_described=is_forced or bool(one.get("strict"))) for one in functions),
        required=is_forced,
        answer=None if is_forced else answer,
        parallel=parallel and name is None,
    )
    return _constrained(calls, job, at_fault="tool_choice" if is_forced else "tools")


def _are_held(functions: Sequence[Mapping[str, Any]], output: StructuredOutputs | None, *, is_forced: bool) -> bool:
    """Return whether a grammar holds the calls of an answer."""
    return is_forced or output is not None or any(one.get("strict") for one in functions)


def _narrowed(job: JobDef, choice: ToolChoice) -> tuple[JobDef, ToolChoice]:
    """Return the job with the tools alone that an `allowed_tools` choice names, and that choice's mode."""
    if isinstance(choice, str) or choice.get("type") != "allowed_tools":
        return job, choice
    try:
        tools, mode = narrowed(json.loads(job.tools or "[]"), choice)
    except ValueError as error:
        raise RequestError(f"tool_choice: {error}", param="tool_choice") from None
    return job.model_copy(update={"tools": json.dumps(tools)}), mode


def _chosen(tools: str, name: str | None) -> list[dict[str, Any]]:
    """Return the functions that the model may call: all, or only the named one."""
    functions = [tool["function"] for tool in json.loads(tools)]
    chosen = functions if name is None else [one for one in functions if one["name"] == name]
    if not chosen:
        raise RequestError(f"tool_choice: the tools have no function {str(name)[:100]!r}", param="tool_choice")
    return chosen


def _name_in(choice: ToolChoice) -> str | None:
    """Return the function that `tool_choice` names, or None for `auto`, `none` and `required`."""
    try:
        return chosen_function(choice)
    except ValueError as error:
        raise RequestError(f"tool_choice: {error}", param="tool_choice") from None


def _wanted(function: Mapping[str, Any], *, as_described: bool) -> WantedFunction:
    described = function.get("parameters")
    parameters = (_NO_ARGUMENTS if described is None else described) if as_described else _ANY_OBJECT
    if as_described and isinstance(parameters, dict) and function.get("strict") is not False:
        parameters = closed(parameters)
    try:
        return WantedFunction(name=function["name"], parameters=json.dumps(parameters))
    except ValidationError as error:
        problem = problem_of(error)
        raise RequestError(f"tools: {problem.param} of a function: {problem.message}", param="tools") from None


def no_call_format() -> RequestError:
    """Return the error for tools that a model without a known call format cannot call."""
    message = (
        "tools: this model takes no tools: it has no chat template, or its node was started with --tool-parser none, "
        "or in a later release than this gateway. Send the request without tools, or ask for JSON with response_format"
    )
    return RequestError(message, param="tools")


def _formats_of(record: PoolRecord, job: JobDef) -> dict[str, Any]:
    reasoning = reasoning_parser_for(record.reasoning_parser, record.thinking_switches, job.chat_template_kwargs)
    if not record.tool_format.takes_tools or reasoning not in get_args(ReasoningParserName):
        raise no_call_format()
    return {"form": record.tool_format, "reasoning": reasoning}


def _answer_of(output: StructuredOutputs, record: PoolRecord, *, is_forced: bool) -> str:
    """Return the JSON schema of an answer without calls."""
    if output.json_schema is None and not output.json_object:
        raise RequestError("tools: of the structured outputs, only JSON can be combined with tools", param="tools")
    if record.tool_format.is_bare and not is_forced:
        # Calls without a mark are JSON themselves, so some answers could not be told from calls.
        raise RequestError("tools: this model's call format cannot be combined with structured output", param="tools")
    return output.json_schema or json.dumps(_ANY_OBJECT)


def _constrained(calls: WantedCalls, job: JobDef, *, at_fault: str) -> JobDef:
    params = job.params
    if params.min_tokens or params.ignore_eos:
        said = "constrained calls define the end of the text, so min_tokens and ignore_eos must not be set"
        raise RequestError(f"{at_fault}: {said}", param=at_fault)
    constrained = params.model_copy(update={"structured_outputs": StructuredOutputs(calls=calls)})
    return job.model_copy(update={"params": constrained})


Prompt = str | Sequence[int] | Sequence[Mapping[str, Any] | Message] | PackedPrompt
"""Text, token ids, the messages of a chat, or any of these packed by `pack_prompt_of`."""


# A caller's arguments become a job.

_OF_JOB = OPTIONS_OF_QUEUE & JobDef.model_fields.keys() - {"adapter", "params", "tenant"}
"""Options that become a field of the job as they are."""
_ANY_ID = "any.00000000-0000-7000-8000-000000000000"
_ARGUMENT_OF = {"id": "job_id", "prompt_token_ids": "prompt", **{field: name for name, field in DURATIONS.items()}}
"""Fields of a job to the arguments that callers pass for them."""


def job_key_of(options: SubmitOptions, tenant: str) -> JobKey | None:
    """Return the idempotency key of a submission, or None. Raises RequestError for a wrong key or tenant."""
    if (key := options.get("idempotency_key")) is None:
        return None
    try:
        job = JobDef(id=_ANY_ID, prompt="", tenant=options.get("tenant") or tenant, idempotency_key=key)
    except ValidationError as error:
        raise request_error(error, _ARGUMENT_OF) from None
    return JobKey(job.tenant, key)


_MAX_TOOLS_CHARS_ON_LOOP = 16 << 10


async def built_job(prompt: Prompt, options: SubmitOptions, record: PoolRecord, tenant: str) -> JobDef:
    """Return what `build_job` returns. A job with large tools is built on a thread, and does not hold the event loop.

    Their schemas are parsed several times.
    """
    tools = options.get("tools")
    if isinstance(tools, str) and len(tools) > _MAX_TOOLS_CHARS_ON_LOOP:
        return await asyncio.to_thread(build_job, prompt, options, record, tenant)
    return build_job(prompt, options, record, tenant)


def _new_id_in(record: PoolRecord) -> str:
    """Return a job's id. Without Redis, such as for a plan, it has this machine's time."""
    return record.new_job_id() if isinstance(record, ServedPool) else f"{record.pool}.{uuid_utils.uuid7()}"


def build_job(prompt: Prompt, options: SubmitOptions, record: PoolRecord, tenant: str) -> JobDef:
    """Build and check a job for a pool. Raises RequestError with the name of the wrong argument."""
    of_job = {name: value for name, value in options.items() if name in _OF_JOB}
    priority = checked_class(options.get("priority"))
    of_job["priority"] = default_class(bool(options.get("background", True))) if priority is None else priority
    if isinstance(task := options.get("task"), TextTask):
        of_job["task"] = task.within(record.max_model_len)
    sampling = {name: value for name, value in options.items() if name not in OPTIONS_OF_QUEUE}
    try:
        params = _params_of(options, sampling, record)
        if options.get("lower_max_tokens") and params.max_tokens is not None:
            of_job["max_total_tokens"] = record.max_model_len or None
        form, value = _prompt_field(prompt)
        job = JobDef(
            id=options.get("job_id") or _new_id_in(record),
            adapter=_adapter_of(options, record),
            tenant=options.get("tenant") or tenant,
            params=params,
            **{form: value},
            **durations_of(options),
            **of_job,
        )
    except ValidationError as error:
        raise request_error(error, _ARGUMENT_OF) from None
    if job.task is not None:
        _check_task(job, record)
        return job
    given = options.get("params")
    job = with_budget(job, options.keys() if given is None else given.model_fields_set, record)
    choice, parallel = options.get("tool_choice", "auto"), options.get("parallel_tool_calls", True)
    if job.tools is None and choice == "auto":
        return job
    return with_choice(job, choice, parallel=parallel, record=record)


def _check_task(job: JobDef, record: PoolRecord) -> None:
    if job.kind not in record.kinds:
        message = f"the nodes of model {record.model!r} do not know jobs of kind {job.kind!r}; upgrade them"
        raise UnsupportedKindError(message)
    num_bytes, num_ids = prompt_bytes(job) + tool_bytes(job), num_prompt_ids(job) or 0
    if isinstance(job.task, TextTask) and job.task.texts:
        if len(job.task.texts) > record.texts_per_job:
            limit = record.texts_per_job
            raise UnsupportedKindError(f"the nodes of model {record.model!r} take {limit} texts in one job at most")
        num_bytes += sum(len(text.encode()) for text in job.task.texts if isinstance(text, str))
        num_ids += sum(len(text) for text in job.task.texts if not isinstance(text, str))
    if num_bytes > MAX_TASK_BYTES:
        raise TooLargeError(f"prompt has {num_bytes} bytes; the limit of a task is {MAX_TASK_BYTES}", param="prompt")
    if num_ids > MAX_TASK_TOKENS:
        raise TooLargeError(f"prompt has {num_ids} token ids; the limit of a task is {MAX_TASK_TOKENS}", param="prompt")


def pack_prompt_of(prompt: Prompt) -> PackedPrompt:
    """Check a prompt as a job's prompt, and pack it. Raises RequestError with the name of the wrong field."""
    try:
        form, value = _prompt_field(prompt)
        job = JobDef(id=_ANY_ID, **{form: value})
    except ValidationError as error:
        raise request_error(error, _ARGUMENT_OF) from None
    if job.packed_prompt is not None:
        return job.packed_prompt
    fields: dict[str, Any] = {}
    add_prompt(fields, job)
    ((name, value),) = fields.items()
    return PackedPrompt(
        cast(PromptField, name), pack(value), prompt_bytes(job), num_prompt_ids(job), call_bytes(job), first_words(job)
    )


def _adapter_of(options: SubmitOptions, record: PoolRecord) -> AdapterRef | None:
    """Return the adapter that `model` or `adapter` names. Its digest makes all nodes use the same weights."""
    model, name = options.get("model"), options.get("adapter")
    as_model = model if model is not None and model not in names_of(record) else None
    if name is not None and as_model not in (None, name):
        raise RequestError(f"model {as_model!r} is an adapter, and adapter names another one", param="adapter")
    name, task = name or as_model, options.get("task")
    if task is not None and not task.num_sequences:
        return None  # The tokenizer is the same for all adapters.
    return None if name is None else AdapterRef(name=name, digest=record.adapters[name])


def _prompt_field(prompt: Prompt) -> tuple[str, Any]:
    """Return the field of a job that holds the prompt, and its value."""
    if isinstance(prompt, PackedPrompt):
        return "packed_prompt", prompt
    if isinstance(prompt, str):
        return "prompt", prompt
    if not isinstance(prompt, Sequence) or isinstance(prompt, (bytes, bytearray)):
        raise RequestError("prompt must be text, a sequence of token ids or a sequence of messages", param="prompt")
    if not prompt:
        raise RequestError("prompt must not be empty", param="prompt")
    if isinstance(prompt[0], str):
        raise RequestError("prompt must be one text, not a list: `generate` and `map` take several", param="prompt")
    if isinstance(prompt[0], (Mapping, Message)):
        return "messages", tuple(prompt)
    return "prompt_token_ids", tuple(prompt)


def _params_of(options: SubmitOptions, sampling: Mapping[str, Any], record: PoolRecord) -> SamplingParams:
    if (params := options.get("params")) is None:
        params = SamplingParams(**sampling)
    elif sampling:
        name = next(iter(sampling))
        raise RequestError(f"{name}: give sampling as params or as single arguments, not both", param=name)
    return params if options.get("task") is not None else with_defaults(params, record)


def check_streamable(options: Mapping[str, Any]) -> None:
    """Refuse to stream a job whose choices are ranked when all of them are complete. Raises RequestError."""
    if (params := options.get("params")) is not None:
        is_refused = params.withholds_output
    else:
        is_refused = options.get("use_beam_search") or (options.get("best_of") or 0) > options.get("n", 1)
    if is_refused:
        name = "use_beam_search" if getattr(params, "use_beam_search", options.get("use_beam_search")) else "best_of"
        message = f"{name}: cannot be streamed, because its choices are ranked when all of them are complete"
        raise RequestError(message, code="unsupported_value", param=name)


def with_defaults(params: SamplingParams, record: PoolRecord) -> SamplingParams:
    """Return the parameters with the sampling that the pool's model recommends, where the caller set none.

    An option that the caller set to its default value is set too.
    """
    if params.use_beam_search:
        return params  # It samples nothing.
    missing = {name: value for name, value in record.sampling_defaults.items() if name not in params.model_fields_set}
    return params.model_copy(update=missing) if missing else params


def durations_of(options: Mapping[str, Any]) -> dict[str, int]:
    """Return the fields of a job for the options in seconds. Raises RequestError for one that is wrong."""
    if DURATIONS.keys().isdisjoint(options):
        return {}
    spans = {name: span for name in DURATIONS if (span := options.get(name)) is not None}
    given: dict[str, Any] = {name: seconds_of(name, span) for name, span in spans.items()}
    found = {DURATIONS[name]: _milliseconds(name, seconds) for name, seconds in given.items()}
    if "max_wait_s" in given and options.get("background", True):
        message = "max_wait_s limits the wait of foreground work; a background job waits for as long as it takes"
        raise RequestError(message, param="max_wait_s")
    if "reader_grace_s" in given and options.get("needs_reader") is False:
        raise RequestError("reader_grace_s: a job with needs_reader=False waits for no reader", param="reader_grace_s")
    for name in LATER_THAN_START if (start_s := given.get("not_before_s")) else ():
        if start_s >= given.get(name, math.inf):
            message = f"not_before_s ({start_s}) must be less than {name} ({given[name]})"
            raise RequestError(message, param="not_before_s")
    return found


def _range_of(name: str) -> tuple[float, bool, float]:
    """Return the shortest duration in seconds, whether it must be longer than that, and the longest."""
    marks: dict[type, Any] = {type(mark): mark for mark in QueueFields.model_fields[name].metadata}
    above = marks.get(Gt)
    return (marks[Ge].ge if above is None else above.gt), above is not None, marks[Le].le


_RANGES = {name: _range_of(name) for name in DURATIONS}


def _milliseconds(name: str, seconds: float) -> int:
    low, is_open, high = _RANGES[name]
    if isinstance(seconds, (int, float)) and low <= seconds <= high and not (is_open and seconds == low):
        return math.ceil(1000 * seconds)
    lowest = f"above {low} and at most" if is_open else f"from {low} to"
    raise RequestError(f"{name} must be {lowest} {high} seconds", param=name)


# How the text of an answer is parsed.


def answer_format(
    tool_use: ToolUse, params: SamplingParams, template_kwargs: str | None, record: PoolRecord | None
) -> AnswerFormat:
    """Return how to parse the text of an answer from the pool of this record.

    Raises RequestError if the request offers tools and no parser exists for the model's calls.
    """
    if tool_use.tools is None:
        if record is None:
            return PLAIN
        form = record.tool_format
        reasoning = _reasoning_parser(record, template_kwargs)
        return AnswerFormat(None, reasoning, marks=form.reasoning, frame=form if form.has_frame else None)
    record = require_tool_parser(record)
    reasoning = _reasoning_parser(record, template_kwargs)
    form = record.tool_format
    return AnswerFormat(
        form,
        reasoning,
        one_call=not tool_use.parallel,
        is_named=tool_use.is_named,
        functions=tool_use.tools if form.kind == "tagged" else None,
        marks=form.reasoning,
        frame=form if form.has_frame else None,
        names=() if reasoning == "none" else _callable_in_reasoning(tool_use.tools, tool_use.choice, params),
    )


def _callable_in_reasoning(tools: str, choice: ToolChoice, params: SamplingParams) -> tuple[str, ...]:
    """Return the functions whose calls end reasoning without a closing mark; none if a grammar holds the calls."""
    functions = [tool["function"] for tool in json.loads(tools)]
    is_held = _are_held(functions, params.structured_outputs, is_forced=choice != "auto")
    return () if is_held else tuple(one["name"] for one in functions)


def require_tool_parser(record: PoolRecord | None) -> PoolRecord:
    """Return the pool's record if its model's tool calls can be read; otherwise raise RequestError."""
    if record is None or not record.tool_format.takes_tools:
        raise no_call_format()
    return record


def _reasoning_parser(record: PoolRecord, template_kwargs: str | None) -> str:
    return reasoning_parser_for(record.reasoning_parser, record.thinking_switches, template_kwargs)
