"""Jobs that ask for tokens instead of text: their arguments, and the outputs that callers get."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, TypeVar, cast

from penstock.contract.errors import InvariantError
from penstock.contract.job import Result
from penstock.contract.priority import Priority
from penstock.contract.tasks import Detokenize, Task, TaskOutput, Tokenize
from penstock.contract.terms import Terms
from penstock.producer.client.request import SubmitOptions

AnyOutput = TypeVar("AnyOutput", bound=TaskOutput)


class TaskOptions(TypedDict, total=False):
    """Keyword arguments of `detokenize`. `SubmitOptions` describes each of them."""

    model: str | None
    priority: Priority
    deadline_s: float | None
    tenant: str | None
    terms: Terms | None


class CountOptions(TaskOptions, total=False):
    """Keyword arguments of `count_tokens`. `Tokenize` describes the last two."""

    tools: Sequence[Mapping[str, Any]] | str | None
    add_special_tokens: bool | None
    add_generation_prompt: bool


class TokenizeOptions(CountOptions, total=False):
    """Keyword arguments of `tokenize`."""

    return_token_strs: bool


def submit_tokenize(options: TokenizeOptions | CountOptions, *, return_tokens: bool) -> SubmitOptions:
    """Return the options with which to submit a `Tokenize` job."""
    of_task = {name: value for name, value in options.items() if name in Tokenize.model_fields}
    others = {name: value for name, value in options.items() if name not in Tokenize.model_fields}
    return _of_task(Tokenize.model_validate({"return_tokens": return_tokens, **of_task}), others)


def submit_detokenize(options: TaskOptions) -> SubmitOptions:
    """Return the options with which to submit a `Detokenize` job."""
    return _of_task(Detokenize(), options)


def _of_task(task: Task, options: Mapping[str, Any]) -> SubmitOptions:
    # The caller waits for the output, so the job ends with its caller.
    return cast(SubmitOptions, {**options, "task": task, "background": False})


def output_of(result: Result, kind: type[AnyOutput]) -> AnyOutput:
    """Return the output of a job that is `done`. Raises InvariantError for an output of another kind."""
    if not isinstance(result.output, kind):
        raise InvariantError(f"the result of job {result.job_id} has no output of type {kind.__name__}")
    return result.output
