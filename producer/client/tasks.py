"""Jobs that ask for tokens or embeddings instead of text: their arguments, and the outputs that callers get."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

from pydantic import ValidationError

from penstock.contract.errors import InvariantError
from penstock.contract.job import SubmitOptions, TaskQueueOptions
from penstock.contract.output import Result
from penstock.contract.priority import ClassName, Priority
from penstock.contract.problems import request_error
from penstock.contract.tasks import (
    Classify,
    Detokenize,
    Embed,
    InputType,
    Pooling,
    Score,
    Task,
    TaskOptions,
    TaskOutput,
    Tokenize,
    TruncationSide,
)
from penstock.contract.tenant import Terms

AnyOutput = TypeVar("AnyOutput", bound=TaskOutput)


class TaskCallOptions(TaskQueueOptions, total=False):
    """Keyword arguments of `detokenize`. `SubmitOptions` describes each of them."""

    model: str | None
    priority: Priority | ClassName
    tenant: str | None
    terms: Terms | None


class CountOptions(TaskCallOptions, total=False):
    """Keyword arguments of `count_tokens`. `Tokenize` describes the last two."""

    tools: Sequence[Mapping[str, Any]] | str | None
    add_special_tokens: bool | None
    add_generation_prompt: bool


class TokenizeOptions(CountOptions, total=False):
    """Keyword arguments of `tokenize`."""

    return_token_strs: bool


class EmbedOptions(TaskCallOptions, total=False):
    """Keyword arguments of `embed`. `Embed` describes the first seven, `SubmitOptions` the last one."""

    pooling: Pooling | None
    dimensions: int | None
    truncate_prompt_tokens: int | None
    truncation_side: TruncationSide | None
    prompt_name: str | None
    normalize: bool | None
    input_type: InputType | None
    adapter: str | None


class ClassifyOptions(TaskCallOptions, total=False):
    """Keyword arguments of `classify`. `Classify` describes them."""

    raw: bool
    truncate_prompt_tokens: int | None
    truncation_side: TruncationSide | None


class RerankOptions(TaskCallOptions, total=False):
    """Keyword arguments of `rerank`.

    top_n: how many of the best documents to return; None: all.
    The others: as `Score` describes them.
    """

    top_n: int | None
    truncate_prompt_tokens: int | None
    truncation_side: TruncationSide | None
    max_tokens_per_query: int | None
    max_tokens_per_doc: int | None
    raw: bool | None


def submit_tokenize(options: TokenizeOptions | CountOptions, *, return_tokens: bool) -> SubmitOptions:
    """Return the options with which to submit a `Tokenize` job."""
    of_task, others = _divided(options, Tokenize)
    return _of_task(Tokenize.model_validate({"return_tokens": return_tokens, **of_task}), others)


def submit_detokenize(options: TaskCallOptions) -> SubmitOptions:
    """Return the options with which to submit a `Detokenize` job."""
    return _of_task(Detokenize(), options)


def submit_embed(options: EmbedOptions) -> SubmitOptions:
    """Return the options with which to submit an `Embed` job. Raises RequestError."""
    return _submit(Embed, options)


def submit_classify(options: ClassifyOptions) -> SubmitOptions:
    """Return the options with which to submit a `Classify` job. Raises RequestError."""
    return _submit(Classify, options)


def submit_score(options: Mapping[str, Any]) -> SubmitOptions:
    """Return the options with which to submit a `Score` job, whose texts are to be set. Raises RequestError."""
    return _submit(Score, {"texts": ("",), **options})


def _submit(kind: type[Embed | Score | Classify], options: Mapping[str, Any]) -> SubmitOptions:
    of_task, others = _divided(options, kind)
    try:
        return _of_task(kind.model_validate(of_task), others)
    except ValidationError as error:
        raise request_error(error) from None


def _divided(options: Mapping[str, Any], task: type[TaskOptions]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of a task, and the others."""
    of_task = {name: value for name, value in options.items() if name in task.model_fields}
    return of_task, {name: value for name, value in options.items() if name not in of_task}


def _of_task(task: Task, options: Mapping[str, Any]) -> SubmitOptions:
    # The caller waits for the output, so the job ends with its caller.
    return cast(SubmitOptions, {**options, "task": task, "background": False})


def output_of(result: Result, kind: type[AnyOutput]) -> AnyOutput:
    """Return the output of a job that succeeded. Raises InvariantError for an output of another kind."""
    if not isinstance(result.output, kind):
        raise InvariantError(f"the result of job {result.job_id} has no output of type {kind.__name__}")
    return result.output
