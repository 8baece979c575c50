"""The jobs of a request: limits that are checked before, their submission, and their end."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.contract.errors import NotConfirmedError, NotFoundError, PenstockError, RequestError, UnavailableError
from penstock.contract.job import PackedPrompt, SamplingParams, SubmitOptions
from penstock.contract.pool import PoolRecord
from penstock.contract.problems import rename
from penstock.contract.sampling import MAX_TOKENS_LIMIT
from penstock.contract.tasks import GENERATE, TextTask, Tokenize, Tokenized
from penstock.contract.tenant import NO_LIMIT, Terms
from penstock.gateway.kept.answer import AnswerKeep
from penstock.gateway.request.generation import GenerationRequest
from penstock.gateway.request.kept import facts_of
from penstock.gateway.request_line import line_of_request
from penstock.producer.client import AsyncClient, AsyncJob
from penstock.producer.client.request import Prompt, job_key_of
from penstock.producer.client.tasks import output_of
from penstock.producer.parsed_body import ParsedBody
from penstock.producer.text_bodies import naming_prompt, pool_for, text_jobs_of
from penstock.queue.broker.producer import ServedPool
from penstock.queue.job_cost import REQUEST_BYTES_PER_TOKEN
from penstock.runtime.event_loop import try_all

LEAVE_TIMEOUT_S = 5.0
"""Seconds for canceling the jobs of a caller that is gone. If Redis is unreachable, the queue ends the jobs later."""


@dataclass(frozen=True, slots=True)
class Keeping:
    """How an answer is kept, so that it outlives this gateway."""

    keep: AnswerKeep
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What the API adds to the record."""
    shows_prompts: bool = False
    is_stream: bool = True

    def begin(self, generation: GenerationRequest, job_ids: Sequence[str]) -> None:
        """Note the record, before the jobs are submitted."""
        facts = {**facts_of(generation, job_ids, shows_prompts=self.shows_prompts), **self.facts}
        facts["is_stream"] = self.is_stream
        self.keep.begin(facts, num_counters_of(len(job_ids)) if self.is_stream else 1)

    def note_jobs(self, begun: Sequence[str], jobs: Sequence[AsyncJob]) -> None:
        """Note the jobs, if they have other ids than those that were `begun`: an earlier request had the same key."""
        if [job.id for job in jobs] != [*begun]:
            self.keep.add({"job_ids": [job.id for job in jobs]})


def num_counters_of(num_jobs: int) -> int:
    """Return how many positions a stream has: one of each job, and that of its end if it has several jobs."""
    return num_jobs if num_jobs == 1 else num_jobs + 1


@contextlib.asynccontextmanager
async def open_jobs(
    client: AsyncClient,
    generation: GenerationRequest,
    *,
    has_begun: Callable[[], bool] = lambda: False,
    keeping: Keeping | None = None,
) -> AsyncIterator[list[AsyncJob]]:
    """Submit all jobs of a request, or none, and yield them. If an error ends the block, the jobs are canceled.

    With `keeping`, their ids are noted before; the jobs of an answer that was taken over are attached to instead.

    Three kinds of jobs are released instead of canceled. A job with an idempotency key may be shared with another
    caller. A job with a reader grace waits for its readers. The caller of a stream that `has_begun` may resume it, if
    its events have ids. The queue ends such a job after its grace time without a reader, unless it needs none.
    """
    jobs: list[AsyncJob] = []
    body, event_ids = generation.body, generation.event_ids
    names = body.names
    is_shared = (
        generation.key is not None
        or generation.cut_at is not None
        or not generation.requires_reader
        or body.queueing.get("reader_grace_s") is not None
    )
    record = None if keeping is None else keeping.keep.record
    try:
        if record is not None:
            await _attach_all(client, generation, record["job_ids"], jobs)
        elif generation.cut_at is not None:
            if keeping is not None:
                keeping.begin(generation, [generation.cut_at.job_id])
            jobs.append(await _attached(client, generation, generation.cut_at.job_id))
        else:
            await _submit_all(client, generation, await _submissions(client, generation), keeping, jobs)
        line_of_request().note_jobs([job.id for job in jobs])
        del body, generation  # Its prompts may have megabytes, and the block lasts as long as the jobs.
        yield jobs
    except BaseException as error:
        if isinstance(error, PenstockError):
            rename(error, names)
        # A stream whose tokens Redis does not confirm is cut too: its job goes on.
        is_cut = isinstance(error, asyncio.CancelledError | NotConfirmedError)
        may_resume = event_ids and is_cut and has_begun()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_TIMEOUT_S):
                await try_all([job.detach if is_shared or may_resume else job.cancel for job in jobs])
        raise


async def _submit_all(
    client: AsyncClient,
    generation: GenerationRequest,
    submissions: Sequence[tuple[int, Prompt, SubmitOptions]],
    keeping: Keeping | None,
    jobs: list[AsyncJob],
) -> None:
    """Submit the jobs of a request, and add their handles to `jobs`. With `keeping`, note them before."""
    begun = list[str]()

    def begin(*job_ids: str) -> None:
        if keeping is not None and all(job_ids):
            keeping.begin(generation, job_ids)
            begun.extend(job_ids)

    notes = (begin,) if keeping is not None and len(submissions) == 1 else ()
    if keeping is not None and not notes:
        # The record has the ids of all jobs, so their pools are chosen before the first one is submitted.
        submissions = await _named(client, generation, submissions)
        begin(*(options.get("job_id") or "" for _, _, options in submissions))
    for number, prompt, options in submissions:
        with naming_prompt(generation.body, number):
            jobs.append(await client.submit_noting(prompt, options, *notes))
        del prompt
    if keeping is not None and begun:
        keeping.note_jobs(begun, jobs)


async def _attached(client: AsyncClient, generation: GenerationRequest, job_id: str) -> AsyncJob:
    """Return a handle on a job that exists. Its tokens are waited for as the request says."""
    return await client.attach(
        job_id, after=generation.read_after, tenant=generation.tenant, token_durability=generation.token_durability
    )


async def _attach_all(
    client: AsyncClient, generation: GenerationRequest, job_ids: Sequence[str], jobs: list[AsyncJob]
) -> None:
    """Add handles on the jobs of an answer that was taken over to `jobs`, also if its caller leaves meanwhile.

    Raises UnavailableError if Redis does not know them all: the earlier gateway died before it had submitted them.
    """
    attaching = asyncio.ensure_future(_attach_each(client, generation, job_ids, jobs))
    try:
        await asyncio.shield(attaching)
    except asyncio.CancelledError:
        # The caller may have closed its connection while no gateway ran. Jobs without handles could not be canceled.
        with contextlib.suppress(PenstockError, TimeoutError):
            async with asyncio.timeout(LEAVE_TIMEOUT_S):
                await attaching
        raise


async def _attach_each(
    client: AsyncClient, generation: GenerationRequest, job_ids: Sequence[str], jobs: list[AsyncJob]
) -> None:
    for job_id in job_ids:
        try:
            jobs.append(await _attached(client, generation, job_id))
        except NotFoundError:
            message = "this gateway was stopped before the request was in the queue; repeat the request"
            raise UnavailableError(message, code="gateway_stopped") from None


async def _named(
    client: AsyncClient, generation: GenerationRequest, submissions: Sequence[tuple[int, Prompt, SubmitOptions]]
) -> list[tuple[int, Prompt, SubmitOptions]]:
    """Return the submissions with the ids of their jobs, which the client makes otherwise."""
    named: list[tuple[int, Prompt, SubmitOptions]] = []
    for number, prompt, options in submissions:
        task = options.get("task")
        try:
            pool = await client.served_pool(
                options.get("model"),
                options.get("job_id"),
                key=job_key_of(options, generation.tenant),
                kind=GENERATE if task is None else task.kind,
                hides_models=generation.hides_models,
            )
        except PenstockError:
            # The submission raises it again, and counts it.
            named.append((number, prompt, options))
            continue
        named.append((number, prompt, {**options, "job_id": options.get("job_id") or pool.new_job_id()}))
    return named


async def _submissions(
    client: AsyncClient, generation: GenerationRequest
) -> Sequence[tuple[int, Prompt, SubmitOptions]]:
    """Return the jobs of a request: the number of each one's first prompt, and the arguments of its submission."""
    body = generation.body
    if not isinstance(body.task, TextTask):
        return [(number, prompt, generation.options_of(number)) for number, prompt in enumerate(body.prompts)]
    model = generation.options_of(0).get("model")
    record = await pool_for(client, body, model, hides_models=generation.hides_models)
    jobs = text_jobs_of(body, record)
    return [(job.first, job.prompt, {**generation.options_of(job.first), "task": job.task}) for job in jobs]


# Limits on the size of one answer, checked before its jobs are queued.


def check_num_jobs(body: ParsedBody, terms: Terms, record: ServedPool) -> None:
    """Raise RequestError if a request has more prompts than jobs may be open at once. A retry could not help it."""
    num_jobs = len(text_jobs_of(body, record)) if isinstance(body.task, TextTask) else len(body.prompts)
    for limit, owner in ((terms.max_open_jobs, "this tenant"), (record.max_open_jobs, "this model's pool")):
        if NO_LIMIT < limit < num_jobs:
            message = (
                f"prompt: {num_jobs} prompts become as many jobs, and {owner} may have at most {limit} open jobs "
                "(max_open_jobs); send fewer prompts in one request"
            )
            error = RequestError(message, code="too_many_jobs", param="prompt")
            rename(error, body.names)
            raise error


def check_logprobs(body: ParsedBody, record: PoolRecord, limit: int) -> None:
    """Raise RequestError if the answer may hold more than `limit` log-probabilities.

    The count covers the tokens of all prompts and all tokens that may be generated. For a prompt given as text it
    estimates tokens from bytes, as the queue does; the node later checks each job with exact counts.
    """
    params = body.params
    limit_of_prompt = params.truncate_prompt_tokens or math.inf
    num_tokens = int(sum(min(num_prompt_tokens(prompt, record), limit_of_prompt) for prompt in body.prompts))
    of_prompts = num_tokens * (_per_token(params.prompt_logprobs) or params.return_token_ids)
    # Without max_tokens, the node ends a choice when the job reaches its limit of log-probabilities.
    num_choices = len(body.prompts) * params.n
    max_tokens = min(params.max_tokens or 1, record.max_model_len or MAX_TOKENS_LIMIT)
    of_choices = num_choices * max_tokens * _per_token(params.logprobs)
    if of_prompts + of_choices > limit:
        of_prompt = "return_token_ids" if params.prompt_logprobs is None else "prompt_logprobs"
        name = of_prompt if of_prompts >= of_choices else "logprobs"
        message = (
            f"{name}: {len(body.prompts)} prompts and {num_choices} choices ask for up to "
            f"{of_prompts + of_choices} log-probabilities; a request may ask for at most {limit}"
        )
        error = RequestError(message, param=name)
        rename(error, body.names)
        raise error


def num_prompt_tokens(prompt: Prompt, record: PoolRecord) -> int:
    """Return the number of tokens in a prompt: exact for token ids, estimated from bytes for text."""
    if isinstance(prompt, PackedPrompt):
        num_tokens, num_bytes = prompt.num_tokens, prompt.num_text_bytes
    elif isinstance(prompt, str):
        num_tokens, num_bytes = None, len(prompt.encode(errors="replace"))
    else:
        # A chat cannot ask for log-probabilities of its prompt, so the length of its messages does not matter.
        num_tokens, num_bytes = len(prompt), 0
    counted = math.ceil(num_bytes / REQUEST_BYTES_PER_TOKEN) if num_tokens is None else num_tokens
    return min(counted, record.max_model_len or counted)


def _per_token(num_logprobs: int | None) -> int:
    return 0 if num_logprobs is None else 1 + num_logprobs


# The gateway has no tokenizer, so a node counts the tokens of a prompt.


async def count_prompt_tokens(client: AsyncClient, generation: GenerationRequest) -> int:
    """Return the number of tokens of a request's only prompt, as the model would receive it.

    A node's tokenizer counts them as a job without KV cache. Raises what a submission and its job raise.
    """
    body = replace(generation.body, params=SamplingParams(), task=Tokenize(return_tokens=False))
    async with open_jobs(client, replace(generation, body=body).with_options(background=False)) as (job,):
        return output_of(await job.result(), Tokenized).num_tokens
