"""A checked generation request and the jobs that are submitted for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from penstock.contract.errors import PenstockError
from penstock.contract.job import RETURN_PROGRESS, JobKey, Priority, QueueOptions, SamplingParams, SubmitOptions
from penstock.contract.problems import rename
from penstock.contract.response_record import ResponseRecord
from penstock.contract.tasks import Task
from penstock.contract.tenant import UNLIMITED, Terms
from penstock.producer.client import AsyncClient, AsyncJob
from penstock.producer.client.request import Prompt
from penstock.producer.openai.messages import NO_TOOLS, ToolUse
from penstock.runtime.gather import try_all

LEAVE_TIMEOUT_S = 5.0
"""Seconds for canceling the jobs of a caller that is gone. If Redis is unreachable, the queue ends the jobs later."""
FIRST_OF_TWO = ".1"
"""The end of the id of a chunk's first event, if the chunk has two."""


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """The position in a stream after the last chunk that the caller received."""

    job_id: str
    index: int
    """Index of that chunk in the job's log."""
    num_tokens: int
    """Tokens of the stream up to the end of that chunk."""
    lacks_end: bool = False
    """Whether the caller received only the first of that chunk's two events."""


@dataclass(frozen=True, slots=True)
class RequestContent:
    """What the body of a request asks for, without the caller and the headers."""

    model: str
    """The model's name. Empty if the request names none, which is allowed while only one model is served."""
    prompts: Sequence[Prompt]
    """Each prompt becomes one job."""
    params: SamplingParams
    names: Mapping[str, str] = field(default_factory=dict)
    """Maps penstock's field names to the names in the body where they differ. Errors use the latter."""
    tool_use: ToolUse = NO_TOOLS
    """The tools that the assistant of a chat may or must call."""
    echoes: bool = False
    """Whether the answer begins with the prompt."""
    template_kwargs: str | None = None
    """Variables for the model's chat template, as JSON text."""
    task: Task | None = None
    """What the jobs do instead of generating text."""

    @property
    def needs_token_details(self) -> bool:
        """Whether the answer needs more than text of the tokens: an echo of the prompt, or log-probabilities."""
        return self.echoes or self.params.needs_token_details


FIRST_PROMPT = "first prompt"
"""The entry of `RequestContent.names` for a first prompt that has a field of its own, such as a query."""
PAIRED_PROMPT = "paired prompt"
"""The entry for every other prompt, beginning with the first, where prompts come in pairs of two fields."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A generation request: one job for each prompt, all with the same options."""

    content: RequestContent
    priority: Priority = Priority.STANDARD
    tenant: str = "default"
    terms: Terms = UNLIMITED
    idempotency_key: str | None = None
    queueing: QueueOptions = field(default_factory=QueueOptions)
    """What the body says about the queue."""
    lowers_max_tokens: bool = False
    """Whether `max_tokens` is lowered to what the model's context leaves after the prompt, instead of refused."""
    cut_at: StreamPosition | None = None
    """The position after which to resume an earlier stream. If set, no job is submitted."""
    event_ids: bool = False
    """Whether the events of a stream have ids, or numbers of a stored response. Only such a stream can be resumed."""
    replay_from_start: bool = False
    """Whether a resumed stream is read from its start, because its later chunks depend on earlier ones."""
    job_id: str | None = None
    """The id of the job, for a request with one prompt. The client makes one by default."""
    background: bool = False
    """Whether the jobs continue without a reader."""
    hides_models: bool = False
    """Whether the caller may use only some models. Then an error must not list what else is served."""
    response: ResponseRecord | None = None
    """The record that is stored with the job of a stored response."""

    @property
    def read_after(self) -> int:
        """The index of the chunk after which to read a log; the chunk at `cut_at` is read again for comparison."""
        return -1 if self.cut_at is None or self.replay_from_start else self.cut_at.index - 1

    @property
    def shows_waiting(self) -> bool:
        """Whether a stream reports queue position and prompt progress of its jobs before their first chunks."""
        return bool(self.queueing.get(RETURN_PROGRESS))

    @property
    def key(self) -> JobKey | None:
        """The idempotency key of a request with one prompt."""
        return None if self.idempotency_key is None else JobKey(self.tenant, self.idempotency_key)

    def key_of(self, index: int) -> str | None:
        """Return the idempotency key for the job of the prompt at `index`, or None."""
        if self.idempotency_key is None or len(self.content.prompts) == 1:
            return self.idempotency_key
        return f"{self.idempotency_key}:{index}"


@contextlib.asynccontextmanager
async def open_jobs(
    client: AsyncClient, generation: GenerationRequest, *, has_begun: Callable[[], bool] = lambda: False
) -> AsyncIterator[list[AsyncJob]]:
    """Submit all jobs of a request, or none, and yield them. If an error ends the block, the jobs are canceled.

    Two kinds of jobs are released instead of canceled. A job with an idempotency key may be shared with another
    caller. The caller of a stream that `has_begun` may resume it, if its events have ids. The queue ends such a job
    after its grace time without a reader, unless it is a background job.
    """
    jobs: list[AsyncJob] = []
    names, event_ids = generation.content.names, generation.event_ids
    is_shared = generation.idempotency_key is not None or generation.cut_at is not None or generation.background
    try:
        if generation.cut_at is not None:
            jobs.append(
                await client.attach(generation.cut_at.job_id, after=generation.read_after, tenant=generation.tenant)
            )
        else:
            for number, prompt in enumerate(generation.content.prompts):
                with naming_prompt(generation.content, number):
                    jobs.append(await _submit(client, generation, number, prompt))
                del prompt
        del generation  # Its prompts may have megabytes, and the block lasts as long as the jobs.
        yield jobs
    except BaseException as error:
        if isinstance(error, PenstockError):
            rename(error, names)
        is_canceled = isinstance(error, asyncio.CancelledError)
        may_resume = event_ids and is_canceled and has_begun()
        await _release(jobs, may_resume=is_shared or may_resume)
        raise


@contextlib.contextmanager
def naming_prompt(content: RequestContent, index: int) -> Iterator[None]:
    """Let an error of the block name the prompt that it is about, if there are several."""
    try:
        yield
    except PenstockError as error:
        if error.param == "prompt" and len(content.prompts) > 1:
            error.param = _prompt_name(content.names, index)
        raise


def _prompt_name(names: Mapping[str, str], index: int) -> str:
    """Return the name of a prompt among several; `rename` then replaces `prompt` by the caller's name."""
    if (first := names.get(FIRST_PROMPT)) is not None:
        return first if index == 0 else f"prompt[{index - 1}]"
    if (paired := names.get(PAIRED_PROMPT)) is not None:
        return f"prompt[{index // 2}]" if index % 2 else f"{paired}[{index // 2}]"
    return f"prompt[{index}]"


def queueing_in(options: Mapping[str, Any]) -> QueueOptions:
    """Return the options of a body that say how its jobs are queued."""
    return cast(QueueOptions, {name: options[name] for name in QueueOptions.__annotations__ if name in options})


def submit_options(generation: GenerationRequest) -> SubmitOptions:
    """Return the options that all jobs of a request share."""
    content, tool_use = generation.content, generation.content.tool_use
    options = SubmitOptions(
        model=content.model or None,
        task=content.task,
        params=content.params,
        tools=tool_use.tools,
        tool_choice=tool_use.choice,
        parallel_tool_calls=tool_use.parallel,
        chat_template_kwargs=content.template_kwargs,
        priority=generation.priority,
        tenant=generation.tenant,
        terms=generation.terms,
        lower_max_tokens=generation.lowers_max_tokens,
    )
    return {**options, **generation.queueing}


async def _submit(client: AsyncClient, generation: GenerationRequest, index: int, prompt: Prompt) -> AsyncJob:
    options = submit_options(generation)
    options["background"], options["idempotency_key"] = generation.background, generation.key_of(index)
    options["job_id"], options["response"] = generation.job_id, generation.response
    with hiding_models(generation):
        return await client.submit(prompt, **options)


@contextlib.contextmanager
def hiding_models(generation: GenerationRequest) -> Iterator[None]:
    """Remove the list of served models from an error if the caller may not see all of them."""
    try:
        yield
    except PenstockError as error:
        if generation.hides_models and error.param == "model":
            error.message = error.message.partition("; served:")[0]
            error.args = (error.message,)
        raise


async def _release(jobs: Sequence[AsyncJob], *, may_resume: bool) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LEAVE_TIMEOUT_S):
            await try_all([job.detach if may_resume else job.cancel for job in jobs])
