"""Jobs that ask for tokens or embeddings instead of text: their arguments, and the outputs that callers get."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, TypeVar, Unpack, cast

from pydantic import ValidationError

from penstock.contract.errors import InvariantError, RequestError
from penstock.contract.job import SubmitOptions
from penstock.contract.output import Result
from penstock.contract.priority import Priority
from penstock.contract.problems import request_error
from penstock.contract.tasks import (
    Detokenize,
    Detokenized,
    Embed,
    Embedding,
    Pooling,
    Task,
    TaskOutput,
    Tokenize,
    Tokenized,
)
from penstock.contract.tenant import Terms
from penstock.producer.client.job import AsyncJob
from penstock.producer.client.request import Prompt
from penstock.runtime.gather import try_all

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


class EmbedOptions(TaskOptions, total=False):
    """Keyword arguments of `embed`. `Embed` describes the first three, `SubmitOptions` the last one."""

    pooling: Pooling | None
    dimensions: int | None
    truncate_prompt_tokens: int | None
    adapter: str | None


def submit_tokenize(options: TokenizeOptions | CountOptions, *, return_tokens: bool) -> SubmitOptions:
    """Return the options with which to submit a `Tokenize` job."""
    of_task, others = _divided(options, Tokenize)
    return _of_task(Tokenize.model_validate({"return_tokens": return_tokens, **of_task}), others)


def submit_detokenize(options: TaskOptions) -> SubmitOptions:
    """Return the options with which to submit a `Detokenize` job."""
    return _of_task(Detokenize(), options)


def submit_embed(options: EmbedOptions) -> SubmitOptions:
    """Return the options with which to submit an `Embed` job. Raises RequestError."""
    of_task, others = _divided(options, Embed)
    try:
        return _of_task(Embed.model_validate(of_task), others)
    except ValidationError as error:
        raise request_error(error) from None


def _divided(options: Mapping[str, Any], task: type[Tokenize | Embed]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of a task, and the others."""
    of_task = {name: value for name, value in options.items() if name in task.model_fields}
    return of_task, {name: value for name, value in options.items() if name not in of_task}


def _of_task(task: Task, options: Mapping[str, Any]) -> SubmitOptions:
    # The caller waits for the output, so the job ends with its caller.
    return cast(SubmitOptions, {**options, "task": task, "background": False})


def output_of(result: Result, kind: type[AnyOutput]) -> AnyOutput:
    """Return the output of a job that is `done`. Raises InvariantError for an output of another kind."""
    if not isinstance(result.output, kind):
        raise InvariantError(f"the result of job {result.job_id} has no output of type {kind.__name__}")
    return result.output


class TaskCalls(ABC):
    """The calls of `AsyncClient` whose jobs have a task."""

    @abstractmethod
    async def submit(self, prompt: Prompt, **options: Unpack[SubmitOptions]) -> AsyncJob:
        """Enqueue a job."""

    async def tokenize(self, prompt: Prompt, **options: Unpack[TokenizeOptions]) -> Tokenized:
        """Return the tokens of a text or a chat. A node answers from its tokenizer; no KV cache is needed.

        `TokenizeOptions` lists the options. Raises what `submit` raises, and UnsupportedKindError if the model's nodes
        belong to an older release.
        """
        job = await self.submit(prompt, **submit_tokenize(options, return_tokens=True))
        return output_of(await job.result(), Tokenized)

    async def count_tokens(self, prompt: Prompt, **options: Unpack[CountOptions]) -> int:
        """Return the number of tokens of a text or a chat; see `tokenize`."""
        job = await self.submit(prompt, **submit_tokenize(options, return_tokens=False))
        return output_of(await job.result(), Tokenized).num_tokens

    async def detokenize(self, token_ids: Sequence[int], **options: Unpack[TaskOptions]) -> str:
        """Return the text of tokens, special tokens included. Raises what `tokenize` raises."""
        job = await self.submit(token_ids, **submit_detokenize(options))
        return output_of(await job.result(), Detokenized).text

    async def embed(self, prompts: Sequence[Prompt], **options: Unpack[EmbedOptions]) -> list[Embedding]:
        """Return the embeddings of prompts (texts, token ids or chats) in their order. Each prompt becomes a job.

        `EmbedOptions` lists the options. Raises what `tokenize` raises. If one job fails, the others are canceled.
        """
        if isinstance(prompts, str):
            raise RequestError("prompts must be a list of texts, token ids or chats", param="prompts")
        wanted, jobs = submit_embed(options), list[AsyncJob]()
        try:
            for prompt in prompts:
                jobs.append(await self.submit(prompt, **wanted))
            return [output_of(await job.result(), Embedding) for job in jobs]
        except BaseException:
            await try_all([job.cancel for job in jobs])
            raise
