"""The synchronous client: an asynchronous client on a private thread."""

from __future__ import annotations

import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack, cast

from penstock.contract.channel import ChannelOption
from penstock.contract.durability import Durability
from penstock.contract.durations import Span
from penstock.contract.errors import PenstockError, UnavailableError, error_of
from penstock.contract.job import JobOptions, SubmitOptions
from penstock.contract.job_actions import ActionName, BulkReport, FilterOptions
from penstock.contract.output import Chunk, Outcome, Result, WaitUpdate
from penstock.contract.pauses import Pause
from penstock.contract.priority import ClassName, Priority
from penstock.contract.tasks import Classification, Embedding, Ranked, Tokenized
from penstock.contract.tenant import Terms
from penstock.producer.client.client import AsyncClient
from penstock.producer.client.control import JobControl
from penstock.producer.client.flows import Flow, FlowOptions
from penstock.producer.client.job import AsyncJob
from penstock.producer.client.job_sets import SyncJobSets
from penstock.producer.client.loop_thread import LoopThread
from penstock.producer.client.many import DEFAULTS, GenerateOptions, SubmitRequest, checked
from penstock.producer.client.request import Prompt, check_streamable
from penstock.producer.client.run import Answered, Run, RunStep, next_prompts
from penstock.producer.client.schedules import SyncSchedules
from penstock.producer.client.settings import ClientSettings, ClientStats
from penstock.producer.client.signature import with_options
from penstock.producer.client.tasks import (
    ClassifyOptions,
    CountOptions,
    EmbedOptions,
    RerankOptions,
    TaskCallOptions,
    TokenizeOptions,
)
from penstock.producer.client.webhooks import SyncWebhooks
from penstock.queue.broker.completions import Completion
from penstock.queue.broker.job_lists import JobPage
from penstock.queue.broker.producer import JobStatus, ServedPool, Submitted

T = TypeVar("T")

# The synchronous caller of a run: its prompts are read on the calling thread.


def run_in_thread(loop: LoopThread, run: Run, prompts: Iterator[Prompt]) -> Generator[Answered, None, None]:
    """Run all prompts and yield their answers."""
    end: Callable[[Coroutine[Any, Any, None]], object] = loop.call
    try:
        while (step := loop.call(run.next_step())) is not RunStep.END:
            if isinstance(step, Answered):
                yield step
            else:
                found = list[Prompt | RunStep]()
                try:
                    # On this thread, because an open file or a database cursor may belong to it.
                    found.extend(next_prompts(prompts, run.num_wanted))
                finally:
                    loop.call(run.offer_all(found))
    except GeneratorExit:
        # Without waiting: the garbage collector may close this generator on the loop's own thread.
        end = loop.post
        raise
    finally:
        with suppress(UnavailableError):
            end(run.close())


class Client:
    """Submit jobs and stream their chunks. Any number of threads may share a client, but forked processes may not.

        with Client("redis://localhost") as client:
            for chunk in client.stream("Once upon a time", max_tokens=64):
                print(chunk.text, end="")

    The constructor connects, and raises UnavailableError if Redis is unreachable. The client closes at the end of
    `with`, by `close`, or when the interpreter exits.
    """

    def __init__(
        self,
        redis_url: str | None = None,
        *,
        tenant: str = "default",
        settings: ClientSettings | None = None,
        pools: Mapping[str, str] | None = None,
    ) -> None:
        self._client = AsyncClient(redis_url, tenant=tenant, settings=settings, pools=pools)
        self._loop = LoopThread()
        self.control = Control(self._client.control, self._loop)
        self.webhooks = SyncWebhooks(self._client.webhooks, self._loop.call)
        self.schedules = SyncSchedules(self._client.schedules, self._loop.call)
        self.sets = SyncJobSets(self._client.sets, self._loop.call, partial(_pulled, self))
        self._finalizer = weakref.finalize(self, _close, self._loop, self._client)
        try:
            self._loop.call(self._client.connect())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End every stream of this client. Threads that wait for one get UnavailableError."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return repr(self._client).replace("AsyncClient", "Client", 1)

    @property
    def stats(self) -> ClientStats:
        """The counters of this client."""
        return self._client.stats

    def pools(self, *, renewed: bool = False) -> dict[str, ServedPool]:
        """Return every announced model by pool; see `AsyncClient.pools`."""
        return self._loop.call(self._client.pools(renewed=renewed))

    def served_pool(
        self,
        model: str | None = None,
        job_id: str | None = None,
        *,
        adapter: str | None = None,
        kind: str | None = None,
    ) -> ServedPool:
        """Return the pool to which `submit` sends the jobs of a model; without one, that of the only served model.

        Raises RequestError if `model` is needed, NotFoundError for an unknown one, UnavailableError if none is served.
        """
        return self._loop.call(self._client.served_pool(model, job_id, adapter=adapter, kind=kind))

    @with_options()
    def submit(self, prompt: Prompt, **options: Unpack[SubmitOptions]) -> Job:
        """Check, admit and enqueue a job, and return its handle. `SubmitOptions` describes each option.

        `prompt` is text, token ids or the messages of a chat. A `background` job, the default, goes on if this
        process ends. `client.attach(job.id)` reads it from any process, and `job.cancel()` ends it.

        Raises RequestError (`param` names the wrong argument), BusyError (retry after `retry_after_ms`),
        ConflictError (the id or idempotency key belongs to another request), UnavailableError (no node, or no Redis).
        """
        return Job(self, self._loop.call(self._client.submit(prompt, **options)))

    @with_options(JobOptions)
    def submit_many(
        self, requests: Sequence[SubmitRequest], **options: Unpack[JobOptions]
    ) -> list[Job | PenstockError]:
        """Submit many jobs, and return for each its handle or its error, in order; see `AsyncClient.submit_many`.

        with Client() as client:
            jobs = client.submit_many(["Once upon a time", {"prompt": "Water boils at", "max_tokens": 5}])
        """
        outcomes = self._loop.call(self._client.submit_many(requests, **options))
        return [one if isinstance(one, PenstockError) else Job(self, one) for one in outcomes]

    @with_options(background=False)
    def stream(self, prompt: Prompt, **options: Unpack[SubmitOptions]) -> Iterator[Chunk]:
        """Submit a job and yield its chunks. Raises what `submit` and `Job.stream` raise.

        If the caller stops reading, such as by Ctrl-C, the job is canceled 5 s later, unless it is `background`.
        """
        check_streamable(options)
        return self.submit(prompt, **cast(SubmitOptions, {"background": False, **options})).stream()

    @with_options(GenerateOptions, **DEFAULTS)
    def generate(self, prompts: Prompt | Sequence[Prompt], **options: Unpack[GenerateOptions]) -> list[Result]:
        """Run prompts to their end and return their results, in the order of the prompts; see `AsyncClient.generate`.

            with Client() as client:
                for result in client.generate(["Once upon a time", "Water boils at"], max_tokens=32):
                    print(result.text)

        A single prompt counts as a list of one. The call waits while the pool is busy. After an error, `timeout`
        seconds or Ctrl-C, it cancels its open jobs, unless they are `background`.
        """
        return self._loop.call(self._client.generate(prompts, **options))

    @with_options(GenerateOptions, **DEFAULTS)
    def map(self, prompts: Iterable[Prompt], **options: Unpack[GenerateOptions]) -> Iterator[Result]:
        """Run prompts and yield their results, in the order of the prompts; see `AsyncClient.map`.

            for result in client.map(open("prompts.txt"), max_tokens=32):
                print(result.text)

        It reads the prompts one by one, on the calling thread, as the pool can take them. So a million of them need
        little memory. All else is as in `generate`.
        """
        run = self._client.runs.new(self._client.submit, options, in_order=True)
        answers = run_in_thread(self._loop, run, iter(checked(prompts)))
        return (answer.result for answer in answers)

    @with_options(GenerateOptions, **DEFAULTS)
    def map_unordered(
        self, prompts: Iterable[Prompt], **options: Unpack[GenerateOptions]
    ) -> Iterator[tuple[Prompt, Result]]:
        """Run prompts and yield pairs of prompt and result as the jobs end. All else is as in `map`."""
        run = self._client.runs.new(self._client.submit, options, in_order=False)
        answers = run_in_thread(self._loop, run, iter(checked(prompts)))
        return ((answer.prompt, answer.result) for answer in answers)

    def tokenize(self, prompt: Prompt, **options: Unpack[TokenizeOptions]) -> Tokenized:
        """Return the tokens of a text or a chat. A node answers from its tokenizer; no KV cache is needed.

        `TokenizeOptions` lists the options. Raises what `submit` raises, and UnsupportedKindError if the model's nodes
        belong to an older release.
        """
        return self._loop.call(self._client.tokenize(prompt, **options))

    def count_tokens(self, prompt: Prompt, **options: Unpack[CountOptions]) -> int:
        """Return the number of tokens of a text or a chat; see `tokenize`."""
        return self._loop.call(self._client.count_tokens(prompt, **options))

    def detokenize(self, token_ids: Sequence[int], **options: Unpack[TaskCallOptions]) -> str:
        """Return the text of tokens, special tokens included. Raises what `tokenize` raises."""
        return self._loop.call(self._client.detokenize(token_ids, **options))

    def embed(self, prompts: Sequence[Prompt], **options: Unpack[EmbedOptions]) -> list[Embedding]:
        """Return the embeddings of prompts (texts, token ids or chats) in their order. For an encoder, 64 share a job.

        `EmbedOptions` lists the options. Raises what `tokenize` raises. If one job fails, the others are canceled.
        While the pool is busy, the call waits, as `generate` does.
        """
        return self._loop.call(self._client.embed(prompts, **options))

    def flow(self, **options: Unpack[FlowOptions]) -> Flow:
        """Return a new flow: rows that wait for rows, and have their texts; see `Flow.add` and `FlowOptions`."""
        return Flow(self._client.flow(**options), self._loop.call)

    def rerank(self, query: str, documents: Sequence[str], **options: Unpack[RerankOptions]) -> list[Ranked]:
        """Return documents by how well they fit a query, the best first. `RerankOptions` lists the options."""
        return self._loop.call(self._client.rerank(query, documents, **options))

    def classify(self, texts: Sequence[str], **options: Unpack[ClassifyOptions]) -> list[Classification]:
        """Return the labels of texts in their order. `ClassifyOptions` lists the options. Errors are as in `embed`."""
        return self._loop.call(self._client.classify(texts, **options))

    def attach(
        self,
        job_id: str,
        *,
        after: int = -1,
        channel: ChannelOption = None,
        tenant: str | None = None,
        token_durability: Durability | None = None,
    ) -> Job:
        """Return a handle on a job that any process submitted; see `AsyncClient.attach`."""
        job = self._client.attach(
            job_id, after=after, channel=channel, tenant=tenant, token_durability=token_durability
        )
        return Job(self, self._loop.call(job))

    def result(
        self,
        job_id: str,
        *,
        timeout: float | None = None,
        check: bool = True,
        tenant: str | None = None,
        token_durability: Durability | None = None,
    ) -> Result:
        """Wait for a job's end and return its result; see `Job.result`."""
        result = self._client.result(
            job_id, timeout=timeout, check=check, tenant=tenant, token_durability=token_durability
        )
        return self._loop.call(result)

    def status(self, job_id: str, *, tenant: str | None = None) -> JobStatus:
        """Return a job's state, for people."""
        return self._loop.call(self._client.status(job_id, tenant=tenant))

    def jobs(
        self, *, tenant: str | None = None, after: str | None = None, limit: int = 20, **jobs: Unpack[FilterOptions]
    ) -> JobPage:
        """Return a page of a tenant's jobs, newest first; see `AsyncClient.jobs`."""
        return self._loop.call(self._client.jobs(tenant=tenant, after=after, limit=limit, **jobs))

    def completions_cursor(self, *, pool: str | None = None, tenant: str | None = None) -> str:
        """Return the present end of the tenant's completions; see `AsyncClient.completions_cursor`."""
        return self._loop.call(self._client.completions_cursor(pool=pool, tenant=tenant))

    def completions(
        self, after: str | None = None, *, tag: str | None = None, pool: str | None = None, tenant: str | None = None
    ) -> Iterator[tuple[str, Completion]]:
        """Yield the tenant's jobs as they end, with the cursor behind each; see `AsyncClient.completions`."""
        return _pulled(self, self._client.completions(after, tag=tag, pool=pool, tenant=tenant))

    def as_completed(
        self, jobs: Iterable[Job | str], *, timeout: float | None = None, check: bool = True
    ) -> Iterator[Result]:
        """Yield the results of jobs as they end; see `AsyncClient.as_completed`."""
        handles = [job if isinstance(job, str) else job._job for job in jobs]
        return _pulled(self, self._client.as_completed(handles, timeout=timeout, check=check))

    def cancel(self, job_id: str, *, tenant: str | None = None) -> str:
        """Cancel a job and return its state; see `Job.cancel`."""
        return self._loop.call(self._client.cancel(job_id, tenant=tenant))

    def ack(self, *job_ids: str, tenant: str | None = None) -> int:
        """Free the results of ended jobs, which the caller has stored; see `AsyncClient.ack`."""
        return self._loop.call(self._client.ack(*job_ids, tenant=tenant))


class Control:
    """Steering of accepted jobs; see `JobControl`, whose methods it has."""

    def __init__(self, control: JobControl, loop: LoopThread) -> None:
        self._control = control
        self._loop = loop

    def reschedule(self, job_id: str, not_before_s: Span, *, tenant: str | None = None) -> None:
        """Let a job wait that no node runs, for these seconds from now on; 0 queues it now."""
        self._loop.call(self._control.reschedule(job_id, not_before_s, tenant=tenant))

    def change_class(
        self,
        job_id: str,
        priority: Priority | ClassName | None = None,
        *,
        background: bool | None = None,
        tenant: str | None = None,
    ) -> None:
        """Give a job that no node runs another class, or make it background or foreground work."""
        self._loop.call(self._control.change_class(job_id, priority, background=background, tenant=tenant))

    def retry(self, job_id: str, *, tenant: str | None = None, terms: Terms | None = None) -> Submitted:
        """Submit the request of a job that failed, expired or was canceled as a new job."""
        return self._loop.call(self._control.retry(job_id, tenant=tenant, terms=terms))

    def bulk(
        self,
        action: ActionName,
        *,
        tenant: str | None = None,
        not_before_s: Span | None = None,
        to_priority: Priority | ClassName | None = None,
        to_background: bool | None = None,
        dry_run: bool = False,
        all_jobs: bool = False,
        **jobs: Unpack[FilterOptions],
    ) -> BulkReport:
        """Act on all jobs that a filter names, and return the report."""
        done = self._control.bulk(
            action,
            tenant=tenant,
            not_before_s=not_before_s,
            to_priority=to_priority,
            to_background=to_background,
            dry_run=dry_run,
            all_jobs=all_jobs,
            **jobs,
        )
        return self._loop.call(done)

    def report(self, bulk_id: str, *, tenant: str | None = None) -> BulkReport:
        """Return what a bulk action has done so far."""
        return self._loop.call(self._control.report(bulk_id, tenant=tenant))

    def running(self, *, tenant: str | None = None) -> list[BulkReport]:
        """Return the reports of the bulk actions that have not ended; see `JobControl.running`."""
        return self._loop.call(self._control.running(tenant=tenant))

    def pause(
        self,
        pool: str,
        *,
        tenant: str | None = None,
        priority: Priority | ClassName | None = None,
        background: bool | None = None,
    ) -> list[Pause]:
        """Let nodes take no job of a pool, of a class or kind of work of it, or of a tenant in it."""
        return self._loop.call(self._control.pause(pool, tenant=tenant, priority=priority, background=background))

    def resume(
        self,
        pool: str,
        *,
        tenant: str | None = None,
        priority: Priority | ClassName | None = None,
        background: bool | None = None,
    ) -> list[Pause]:
        """End what `pause` began with the same arguments."""
        return self._loop.call(self._control.resume(pool, tenant=tenant, priority=priority, background=background))

    def paused(self, pool: str | None = None) -> list[Pause]:
        """Return what is paused, of a pool or of all."""
        return self._loop.call(self._control.paused(pool))


class Job:
    """A handle on a submitted or attached job.

    Any number of threads may stream from it. Each stream begins where the handle begins.
    """

    def __init__(self, client: Client, job: AsyncJob) -> None:
        # Keeps the client alive: it closes when the last reference to it is gone.
        self._client = client
        self._loop = client._loop
        self._job = job
        self.id = job.id
        self.pool = job.pool
        self.tenant = job.tenant
        self.channel = job.channel

    def __repr__(self) -> str:
        return f"<Job {self.id}>"

    def stream(self) -> Iterator[Chunk]:
        """Yield the job's chunks in order. After the last chunk, raise the job's error unless it succeeded.

        If the reader leaves early, such as by Ctrl-C, a `background` job goes on, and any other is canceled 5 s later.
        """
        outcome: Outcome | None = None
        for chunk in self.chunks():
            outcome = chunk.outcome
            yield chunk
        if outcome is not None and outcome.state != "succeeded":
            raise error_of(outcome)

    def chunks(self) -> Iterator[Chunk]:
        """Yield the job's chunks in order. The last chunk carries the outcome; a failed job raises no error."""
        with closing(_pulled(self._client, self._job.batches())) as batches:
            for batch in batches:
                yield from batch

    def waiting(self) -> Iterator[WaitUpdate]:
        """Yield the job's position in the queue and the progress of its prompt; see `AsyncJob.waiting`."""
        return _pulled(self._client, self._job.waiting())

    def result(self, *, timeout: float | None = None, check: bool = True) -> Result:
        """Wait for the job's end and return its result. With `check`, raise the job's error unless it succeeded.

        Raises ResultTimeoutError after `timeout` seconds. A job that is `background`, the default of `submit`, goes on
        then; so it does if Ctrl-C ends the wait. `cancel` ends it.
        """
        return self._loop.call(self._job.result(timeout=timeout, check=check))

    def status(self) -> JobStatus:
        """Return the job's state, for people."""
        return self._loop.call(self._job.status())

    def cancel(self) -> str:
        """Cancel the job. Return `cancelled`, `cancelling` (it ends within a step), or its earlier terminal state."""
        return self._loop.call(self._job.cancel())

    def ack(self) -> bool:
        """Free the job's result, which the caller has stored. Return whether this call has freed it.

        Afterwards `result` raises NotFoundError (`result_expired`).
        """
        return self._loop.call(self._job.ack())

    def detach(self) -> None:
        """Stop reading this job here. A job that is not `background` is then canceled if it has no other reader."""
        self._loop.call(self._job.detach())


def _close(loop: LoopThread, client: AsyncClient) -> None:
    loop.stop(client.close())


def _pulled(client: Client, source: AsyncGenerator[T, None]) -> Generator[T, None, None]:
    """Yield what an asynchronous generator yields. It keeps the client alive."""
    try:
        while (item := client._loop.call(_next_of(source))) is not None:
            yield item
    finally:
        # Without waiting: the garbage collector may close this generator on the loop's own thread.
        with suppress(UnavailableError):
            client._loop.post(source.aclose())


async def _next_of(source: AsyncGenerator[T, None]) -> T | None:
    return await anext(source, None)
