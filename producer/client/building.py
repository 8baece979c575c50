"""Apply `tool_choice` to a job: constrain its text to calls, and the calls to their functions' schemas."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, get_args

from pydantic import ValidationError

from penstock.contract.errors import RequestError
from penstock.contract.job import JobDef
from penstock.contract.pool import PoolRecord
from penstock.contract.problems import problem_of
from penstock.contract.sampling import StructuredOutputs
from penstock.contract.tools import (
    CallFormName,
    ReasoningParserName,
    ToolChoice,
    WantedCalls,
    WantedFunction,
    chosen_function,
    closed,
    reasoning_parser_for,
)

_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_ANY_OBJECT = {"type": "object"}


def with_choice(job: JobDef, choice: ToolChoice, *, parallel: bool, record: PoolRecord) -> JobDef:
    """Return the job with its calls constrained.

    The job is unchanged if the model may write any text and no function is strict.
    `parallel` allows several calls; `record` names the model's call format. Raises RequestError that names `tools` or
    `tool_choice`.
    """
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
    if is_constrained or not (is_forced or output or any(one.get("strict") for one in functions)):
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
    names = ", ".join(get_args(CallFormName))
    message = (
        "tools: this model has no known tool-call format, so its calls could not be recognized. Send the request "
        "without tools, or ask for JSON with response_format. If the model's chat template takes tools, its node may "
        f"be started with --tool-parser ({names})"
    )
    return RequestError(message, param="tools")


def _formats_of(record: PoolRecord, job: JobDef) -> dict[str, Any]:
    reasoning = reasoning_parser_for(record.reasoning_parser, record.thinking_switches, job.chat_template_kwargs)
    if record.tool_parser not in get_args(CallFormName) or reasoning not in get_args(ReasoningParserName):
        raise no_call_format()
    return {"form": record.tool_parser, "reasoning": reasoning}


def _answer_of(output: StructuredOutputs, record: PoolRecord, *, is_forced: bool) -> str:
    """Return the JSON schema of an answer without calls."""
    if output.json_schema is None and not output.json_object:
        raise RequestError("tools: of the structured outputs, only JSON can be combined with tools", param="tools")
    if record.tool_parser == "llama3_json" and not is_forced:
        # Calls in Llama 3's format are JSON themselves, so some answers could not be told from calls.
        raise RequestError("tools: this model's call format cannot be combined with structured output", param="tools")
    return output.json_schema or json.dumps(_ANY_OBJECT)


def _constrained(calls: WantedCalls, job: JobDef, *, at_fault: str) -> JobDef:
    params = job.params
    if params.min_tokens or params.ignore_eos:
        said = "constrained calls define the end of the text, so min_tokens and ignore_eos must not be set"
        raise RequestError(f"{at_fault}: {said}", param=at_fault)
    constrained = params.model_copy(update={"structured_outputs": StructuredOutputs(calls=calls)})
    return job.model_copy(update={"params": constrained})
