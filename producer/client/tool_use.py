"""What a choice of tools makes of a job: its text keeps to calls, and these to their functions' schemas."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, get_args

from pydantic import ValidationError

from penstock.contract.errors import RequestError
from penstock.contract.job import Job
from penstock.contract.problems import problem_of
from penstock.contract.structured import StructuredOutputs
from penstock.contract.tools import CallFormName, ReasoningParserName, ToolChoice, WantedCalls, WantedFunction
from penstock.queue.wire import PoolRecord

_WORDS = ("auto", "none", "required")
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_ANY_OBJECT = {"type": "object"}


def with_choice(job: Job, choice: ToolChoice, *, parallel: bool, record: PoolRecord) -> Job:
    """A job of that choice; as it is where the model may say what it likes and none of its functions is strict.

    Raises RequestError naming `tools` or `tool_choice`.
    """
    name = _name_in(choice)
    is_forced = name is not None or choice == "required"
    if job.tools is None:
        if is_forced:
            raise RequestError("tool_choice: there are no tools to choose from", param="tool_choice")
        return job
    if choice == "none":
        return job.model_copy(update={"tools": None})
    functions = _chosen(job.tools, name)
    form = job.params.structured_outputs
    # One that is submitted once more has its calls' form already.
    is_formed = form is not None and form.calls is not None
    if is_formed or not (is_forced or form or any(one.get("strict") for one in functions)):
        return job
    answer = None if form is None else _answer_of(form, record, is_forced=is_forced)
    calls = WantedCalls(
        **_forms_of(record),
        functions=tuple(_wanted(one, as_described=is_forced or bool(one.get("strict"))) for one in functions),
        required=is_forced,
        answer=None if is_forced else answer,
        parallel=parallel and name is None,
    )
    return _keeping_to(calls, job, at_fault="tool_choice" if is_forced else "tools")


def _chosen(tools: str, name: str | None) -> list[dict[str, Any]]:
    """The functions that may be called: all, or the one of a name."""
    functions = [tool["function"] for tool in json.loads(tools)]
    chosen = functions if name is None else [one for one in functions if one["name"] == name]
    if not chosen:
        raise RequestError(f"tool_choice: the tools have no function {str(name)[:100]!r}", param="tool_choice")
    return chosen


def _name_in(choice: ToolChoice) -> str | None:
    """The function that a choice names; None for one of the words."""
    if isinstance(choice, str) and choice in _WORDS:
        return None
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or choice != {"type": "function", "function": {"name": name}}:
        words = ", ".join(_WORDS)
        said = f'must be {words} or {{"type": "function", "function": {{"name": …}}}}'
        raise RequestError(f"tool_choice: {said}", param="tool_choice")
    return name


def _wanted(function: Mapping[str, Any], *, as_described: bool) -> WantedFunction:
    described = function.get("parameters")
    parameters = (_NO_ARGUMENTS if described is None else described) if as_described else _ANY_OBJECT
    try:
        return WantedFunction(name=function["name"], parameters=json.dumps(parameters))
    except ValidationError as error:
        problem = problem_of(error)
        raise RequestError(f"tools: {problem.param} of a function: {problem.message}", param="tools") from error


def _forms_of(record: PoolRecord) -> dict[str, Any]:
    if record.tool_parser not in get_args(CallFormName) or record.reasoning_parser not in get_args(ReasoningParserName):
        raise RequestError("tools: no form is known in which this model calls tools", param="tools")
    return {"form": record.tool_parser, "reasoning": record.reasoning_parser}


def _answer_of(form: StructuredOutputs, record: PoolRecord, *, is_forced: bool) -> str:
    """The schema of an answer that calls nothing."""
    if form.json_schema is None and not form.json_object:
        raise RequestError("tools: of the forms that an answer may have, JSON alone goes with them", param="tools")
    if record.tool_parser == "llama3_json" and not is_forced:
        # Its calls are JSON themselves: not every answer could be told from them.
        raise RequestError("tools: in this model's form they do not go with a form of the answer", param="tools")
    return form.json_schema or json.dumps(_ANY_OBJECT)


def _keeping_to(calls: WantedCalls, job: Job, *, at_fault: str) -> Job:
    params = job.params
    if params.min_tokens or params.ignore_eos:
        said = "calls say what ends a text: neither min_tokens nor ignore_eos goes with them"
        raise RequestError(f"{at_fault}: {said}", param=at_fault)
    formed = params.model_copy(update={"structured_outputs": StructuredOutputs(calls=calls)})
    return job.model_copy(update={"params": formed})
