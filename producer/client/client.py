"""The asynchronous client. The gateway and the synchronous client build on it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Self, Unpack, cast

from penstock.contract.channel import ChannelOption, checked_channel
from penstock.contract.durability import Durability
from penstock.contract.errors import NotFoundError, PenstockError, RequestError, UnavailableError
from penstock.contract.job import MEMORY, NO_RESPONSE, JobKey, JobOptions, SubmitOptions, is_job_id
from penstock.contract.job_actions import FilterOptions, JobFilter
from penstock.contract.output import TERMINAL_STATES, Chunk, Result
from penstock.contract.pool import PoolPressure, PoolStats, RedisState
from penstock.contract.priority import Priority, class_not_allowed
from penstock.contract.prompt import prompts_of
from penstock.contract.tasks import GENERATE, Classification, Detokenized, Embedding, Ranked, Tokenized
from penstock.contract.tenant import ApiKey, Terms
from penstock.contract.usage import MAX_PAGE_ROWS, UsagePage, UsageQuery
from penstock.producer.client import tasks
from penstock.producer.client.completions import CompletionFeed, as_completed, checked_tag
from penstock.producer.client.control import DeadLetterBox, JobControl
from penstock.producer.client.flows import AsyncFlow, FlowOptions
from penstock.producer.client.job import AsyncJob, JobSource
from penstock.producer.client.job_sets import JobSets
from penstock.producer.client.kept import KeptSubmission, KeptSubmissions
from penstock.producer.client.many import DEFAULTS, GenerateOptions, Runs, SubmitRequest, checked, submit_all
from penstock.producer.client.own_check import CheckedSubmission
from penstock.producer.client.pool_choice import chosen_pool
from penstock.producer.client.pools import CachedState, counted, naming_pool
from penstock.producer.client.request import Prompt, built_job, check_streamable, job_key_of
from penstock.producer.client.run import pairs_of, results_of
from penstock.producer.client.schedules import Schedules
from penstock.producer.client.servers import QueueServers
from penstock.producer.client.settings import ClientSettings, ClientStats
from penstock.producer.client.signature import with_options
from penstock.producer.client.text_calls import TextCalls
from penstock.producer.client.webhooks import Webhooks
from penstock.queue.broker.completions import Completion, CompletionCursor
from penstock.queue.broker.connection import warn_of_eviction
from penstock.queue.broker.job_lists import JobPage
from penstock.queue.broker.producer import JobStatus, ServedPool, Submission, Submitted
from penstock.queue.files.batch_records import BatchRecords
from penstock.queue.files.file_records import FileRecords
from penstock.queue.job_cost import estimate_cost, rate_tokens
from penstock.queue.results import PackedResult
from penstock.runtime.settings import pool_urls, redis_url_of

READ_PATIENCE_S = 10.0
"""How long the statistics of all pools wait for a server."""


class AsyncClient:
    """Submit jobs and stream their chunks.

        async with AsyncClient("redis://localhost") as client:
            async for chunk in client.stream("Once upon a time", max_tokens=64):
                print(chunk.text, end="")

    `redis_url` defaults to $PENSTOCK_REDIS_URL, else to the Redis of this user's `penstock serve`. `tenant` owns the
    jobs that name no other tenant. `pools`: the URL of each pool with a Redis of its own, by default $PENSTOCK_POOLS.
    One client serves a whole process, and belongs to one event loop.
    """

    def __init__(
        self,
        redis_url: str | None = None,
        *,
        tenant: str = "default",
        settings: ClientSettings | None = None,
        pools: Mapping[str, str] | None = None,
    ) -> None:
        settings = settings or ClientSettings.load()
        self.stats, self._kept = ClientStats(), KeptSubmissions(settings.max_kept_mib << 20)
        urls = redis_url_of(redis_url), pool_urls() if pools is None else pools
        self.servers = servers = QueueServers(*urls, settings, self.stats, self._kept)
        terms = Terms(weight=settings.weight, memory_percent=settings.memory_percent)
        self._tenant, self._terms, self._settings = tenant, terms, settings
        directory_connection = servers.directory.redis, servers.directory.patience
        self.runs, self.dead = Runs(self.ack, settings.outage_s), DeadLetterBox(servers, self.submit)
        self._texts = TextCalls(self.runs, self.submit, self.served_pool)
        self.webhooks = Webhooks(*directory_connection, tenant, is_away=lambda: servers.has_no_directory)
        self.control = JobControl(servers, self.submit_unread, self.webhooks, tenant=tenant, terms=self._terms)
        self.files, self.batches = FileRecords(*directory_connection), BatchRecords(*directory_connection)
        find, clock = self.served_pool, servers.clock.now_s
        self.schedules = Schedules(*directory_connection, find, self.webhooks, self.files, clock, tenant, self._terms)
        self.feed, self._connecting, self._is_closed = CompletionFeed(servers, self.pools), asyncio.Lock(), False
        self.sets = JobSets(servers, self.feed, self.batches, self.control, self, tenant)

    async def connect(self) -> Self:
        """Subscribe to this client's inbox. `async with` does it too, and a second call does nothing.

        Raises UnavailableError if Redis is unreachable, if the client was closed, or if it is in another event loop.
        """
        async with self._connecting:
            if self._is_closed:
                raise UnavailableError("the client was closed: make another one", code="client_closed")
            if not self.servers.directory.patience.is_open:
                await self.servers.open()
            self.servers.directory.patience.require_open()
        return self

    async def close(self) -> None:
        """End every stream, task and connection of this client. Only jobs that need no reader continue."""
        has_ended = self.servers.directory.patience.is_open and not self.servers.directory.patience.is_in_its_loop()
        self._is_closed = True
        if has_ended:
            return  # All of these ended with the event loop of the client.
        await self.runs.close()
        await self.servers.close()

    async def __aenter__(self) -> Self:
        return await self.connect()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        is_open = self.servers.directory.patience.is_open
        state = "closed" if self._is_closed else "connected" if is_open else "not connected"
        return f"<AsyncClient {self.servers.directory.shown_url} tenant={self._tenant} {state}>"

    @property
    def is_alive(self) -> bool:
        """Whether this client is connected and receives chunks. Once this is false, make another client."""
        return self.servers.directory.patience.is_open and all(
            one.inbox.is_running for one in self.servers.all if one.patience.is_open
        )

    async def served_pool(
        self,
        model: str | None = None,
        job_id: str | None = None,
        *,
        adapter: str | None = None,
        key: JobKey | None = None,
        kind: str | None = None,
        hides_models: bool = False,
    ) -> ServedPool:
        """Return the pool that `chosen_pool` chooses for the names and the kind of job. Raises what that raises."""
        return await chosen_pool(
            self.servers, model, job_id, adapter=adapter, key=key, kind=kind, hides_models=hides_models
        )

    @with_options()
    async def submit(self, prompt: Prompt, **options: Unpack[SubmitOptions]) -> AsyncJob:
        """Check, admit and enqueue a job, and return its handle. `SubmitOptions` describes each option.

        `prompt` is text, token ids or the messages of a chat. A `background` job, the default, may wait behind
        foreground work for as long as it takes, and goes on if this process ends. `client.attach(job.id)` reads it from
        any process, and `job.cancel()` ends it. Raises RequestError (`param` names the wrong argument), BusyError
        (retry after `retry_after_ms`), ConflictError (the id or key belongs to another request), UnavailableError (no
        node, or no Redis); with a durability, UnsupportedDurabilityError, NotOnDiskError or NotReplicatedError.
        """
        return await self.submit_noting(prompt, options)

    async def submit_noting(
        self, prompt: Prompt, options: SubmitOptions, note: Callable[[str], None] = lambda _: None
    ) -> AsyncJob:
        """Submit a job as `submit` does. `note` gets its id when it is admitted, before Redis has it."""
        with counted(self.stats.decisions):
            asked = CheckedSubmission(prompt, options) if callable(options.get("check_output")) else None
            submission = await self._admitted(prompt, options if asked is None else asked.options)
            note(submission.job.id)
            job = await self._enqueue(submission)
            return job if asked is None else asked.watched(job, self.submit)

    @with_options()
    async def submit_unread(self, prompt: Prompt, **options: Unpack[SubmitOptions]) -> Submitted:
        """Submit a job as `submit` does, but do not read it here. Return its id and state.

        Unless it is `background` or needs no reader, it is canceled soon if no other reader attaches to it.
        """
        with counted(self.stats.decisions):
            submission = await self._admitted(prompt, options)
            server = self.servers.of(submission.job.pool)
            return server.renewal.recent.accepted(submission, await server.broker.submit(submission))

    @with_options(JobOptions)
    async def submit_many(
        self, requests: Sequence[SubmitRequest], **options: Unpack[JobOptions]
    ) -> list[AsyncJob | PenstockError]:
        """Submit many jobs, and return for each its handle or the error that refused it, in their order.

        A request is a prompt, or a mapping with the arguments of `submit`, such as `{"prompt": "Hi", "max_tokens": 5}`.
        `options` are those of all jobs; a request's own ones precede them. With an `idempotency_key`, the request at
        index i gets the key `<idempotency_key>:<i>`. Raises RequestError only for options that jobs cannot share.
        """
        return await submit_all(self.submit, checked(requests), options)

    async def submit_many_unread(
        self, requests: Sequence[SubmitRequest | PenstockError]
    ) -> list[Submitted | PenstockError]:
        """Submit many jobs as `submit_unread` does, and return the outcome of each. An error is its own outcome."""
        return await submit_all(self.submit_unread, requests, {})

    async def _admitted(self, prompt: Prompt, options: SubmitOptions) -> Submission:
        """Check and admit a job."""
        self.servers.directory.patience.require_open()
        model, job_id, adapter = options.get("model"), options.get("job_id"), options.get("adapter")
        key, hides = job_key_of(options, self._tenant), options.get("hides_models", False)
        task = options.get("task")
        kind = GENERATE if task is None else task.kind
        record = await self.served_pool(model, job_id, adapter=adapter, key=key, kind=kind, hides_models=hides)
        with naming_pool(record.pool):
            job = await built_job(prompt, options, record, self._tenant)
            if job.webhooks:
                await self.webhooks.check(job.webhooks, job.tenant)
            if job.priority < (highest := Priority.of(self._settings.highest_class)):
                raise class_not_allowed(job.priority, highest, "this client (highest_class)")
            server = self.servers.of(record.pool)
            admission = server.admissions.of(record.pool)
            cost = estimate_cost(job, record, (await admission.recent()).nodes)
        await server.inbox.ensure_heartbeat(record.pool)
        if (waits := options.get("queue_without_node")) is None:
            waits = job.background or self._settings.queue_without_node
        try:
            if not waits:
                await admission.require_node()
        except UnavailableError as refusal:
            # A repeated submission adds no job, so it needs no node.
            has_name = job.idempotency_key or job_id
            if refusal.code == "redis_away" or not has_name or not await server.known_jobs.has(job):
                raise
        terms, model = options.get("terms") or self._terms, model or adapter or record.model
        tokens = rate_tokens(job, record.max_model_len)
        # A job that is canceled without a reader would not outlive Redis's machine anyway.
        durability = job.durability or (MEMORY if job.requires_reader else self._settings.durability)
        return Submission(job, cost, terms, options.get("response") or NO_RESPONSE, tokens, durability, model, waits)

    @with_options(background=False)
    async def stream(self, prompt: Prompt, **options: Unpack[SubmitOptions]) -> AsyncGenerator[Chunk, None]:
        """Submit a job and yield its chunks. Raises what `submit` and `AsyncJob.stream` raise.

        If the caller stops reading, such as by Ctrl-C, the job is canceled 5 s later, unless it is `background`.
        """
        check_streamable(options)
        job = await self.submit(prompt, **cast(SubmitOptions, {"background": False, **options}))
        async with aclosing(job.stream()) as chunks:
            async for chunk in chunks:
                yield chunk

    @with_options(GenerateOptions, **DEFAULTS)
    async def generate(self, prompts: Prompt | Sequence[Prompt], **options: Unpack[GenerateOptions]) -> list[Result]:
        """Run prompts to their end and return their results, in the order of the prompts; `Engine.generate` is alike.

        A single prompt (a text, token ids or a chat) counts as a list of one. `GenerateOptions` lists the options. Up
        to `max_in_flight` jobs are open at once. While the pool is busy, the call waits as long as the pool asks for,
        and keeps fewer jobs open. It raises other errors at once: RequestError for a wrong option, and
        UnavailableError if there is no node at first, or none for `outage_s` later.

        After `timeout` seconds it raises ResultTimeoutError. After that or another error, a cancellation or Ctrl-C, it
        cancels its open jobs. With `needs_reader=False` they go on instead. If the process is killed, the queue cancels
        them soon, unless they need no reader. The jobs are background work; `background=False` makes them go first.

        With an `idempotency_key`, the prompt at index i gets the key `<idempotency_key>:<i>`. If the call is repeated,
        in any process, it finds the jobs of the first one. So an early end leaves such jobs to the queue, as a killed
        process does.
        """
        run = self.runs.new(self.submit, options, in_order=False)
        async with aclosing(run.answers(prompts_of(prompts))) as answers:
            results = {answer.index: answer.result async for answer in answers}
        return [results[index] for index in range(len(results))]

    @with_options(GenerateOptions, **DEFAULTS)
    def map(
        self, prompts: Iterable[Prompt] | AsyncIterable[Prompt], **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[Result, None]:
        """Run prompts and yield their results, in the order of the prompts.

        It reads a prompt only when the pool can take it and the caller waits for a result. So a million prompts take
        the memory of `max_in_flight` jobs and of four times as many results. The results before a failed one come
        first. All else is as in `generate`. A loop that may end early needs `contextlib.aclosing`, as with any
        asynchronous generator; otherwise the jobs are canceled when the garbage collector finds it.
        """
        run = self.runs.new(self.submit, options, in_order=True)
        return results_of(run.answers(checked(prompts)))

    @with_options(GenerateOptions, **DEFAULTS)
    def map_unordered(
        self, prompts: Iterable[Prompt] | AsyncIterable[Prompt], **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[tuple[Prompt, Result], None]:
        """Run prompts and yield pairs of prompt and result as the jobs end. All else is as in `map`."""
        run = self.runs.new(self.submit, options, in_order=False)
        return pairs_of(run.answers(checked(prompts)))

    async def tokenize(self, prompt: Prompt, **options: Unpack[tasks.TokenizeOptions]) -> Tokenized:
        """Return the tokens of a text or a chat. A node answers from its tokenizer; no KV cache is needed.

        `TokenizeOptions` lists the options. Raises what `submit` raises, and UnsupportedKindError if the model's nodes
        belong to an older release.
        """
        job = await self.submit(prompt, **tasks.submit_tokenize(options, return_tokens=True))
        return tasks.output_of(await job.result(), Tokenized)

    async def count_tokens(self, prompt: Prompt, **options: Unpack[tasks.CountOptions]) -> int:
        """Return the number of tokens of a text or a chat; see `tokenize`."""
        job = await self.submit(prompt, **tasks.submit_tokenize(options, return_tokens=False))
        return tasks.output_of(await job.result(), Tokenized).num_tokens

    async def detokenize(self, token_ids: Sequence[int], **options: Unpack[tasks.TaskCallOptions]) -> str:
        """Return the text of tokens, special tokens included. Raises what `tokenize` raises."""
        job = await self.submit(token_ids, **tasks.submit_detokenize(options))
        return tasks.output_of(await job.result(), Detokenized).text

    async def embed(self, prompts: Sequence[Prompt], **options: Unpack[tasks.EmbedOptions]) -> list[Embedding]:
        """Return the embeddings of prompts (texts, token ids or chats) in their order. For an encoder, 64 share a job.

        `EmbedOptions` lists the options. Raises what `tokenize` raises. If one job fails, the others are canceled.
        While the pool is busy, the call waits, as `generate` does.
        """
        return await self._texts.embed(prompts, options)

    async def rerank(
        self, query: str, documents: Sequence[str], **options: Unpack[tasks.RerankOptions]
    ) -> list[Ranked]:
        """Return documents by how well they fit a query, the best first. `RerankOptions` lists the options."""
        return await self._texts.rerank(query, documents, options)

    async def classify(self, texts: Sequence[str], **options: Unpack[tasks.ClassifyOptions]) -> list[Classification]:
        """Return the labels of texts in their order. `ClassifyOptions` lists the options. Errors are as in `embed`."""
        return await self._texts.classify(texts, options)

    def flow(self, **options: Unpack[FlowOptions]) -> AsyncFlow:
        """Return a new flow: rows that wait for rows, and have their texts; see `AsyncFlow.add` and `FlowOptions`."""
        return AsyncFlow(self.files, self.batches, self.schedules, {"tenant": self._tenant, **options})

    async def attach(
        self,
        job_id: str,
        *,
        after: int = -1,
        channel: ChannelOption = None,
        tenant: str | None = None,
        token_durability: Durability | None = None,
    ) -> AsyncJob:
        """Return a handle on a job that any process submitted, for reading the chunks after index `after`.

        Its further chunks are published on the `channel` too. `token_durability` is that of `submit`. Raises
        NotFoundError for a job that the tenant does not have, and ConflictError if the open job has another channel.
        """
        if after < -1:
            raise RequestError("after must be -1 (all of the job) or the index of a chunk", param="after")
        source, inbox = self._source(job_id, tenant, token_durability), self.servers.of_job(job_id).inbox
        source.own_channel = checked_channel(channel)
        await source.check_durability()
        box = inbox.open_box(source.feed, is_held=source.hold is not None)
        try:
            attached = await source.attach()
        except BaseException:
            inbox.close_box(source.feed, box)
            raise
        if attached.num_chunks != after + 1 or attached.state in TERMINAL_STATES:
            box.nudge()
        return AsyncJob(source, inbox, after=after, first_box=box)

    async def result(
        self,
        job_id: str,
        *,
        timeout: float | None = None,  # noqa: ASYNC109
        check: bool = True,
        tenant: str | None = None,
        token_durability: Durability | None = None,
    ) -> Result:
        """Wait for a job's end and return its result; see `AsyncJob.result`."""
        return await self._handle(job_id, tenant, token_durability).result(timeout=timeout, check=check)

    async def packed_result(
        self, job_id: str, *, tenant: str | None = None, token_durability: Durability | None = None
    ) -> PackedResult | None:
        """Return an ended job's result with parts that are decoded on access, or None while the job is open."""
        return await self._source(job_id, tenant, token_durability).last_packed_result()

    async def status(self, job_id: str, *, tenant: str | None = None) -> JobStatus:
        """Return a job's state, for people."""
        return await self._source(job_id, tenant, None).status()

    async def jobs(
        self, *, tenant: str | None = None, after: str | None = None, limit: int = 20, **jobs: Unpack[FilterOptions]
    ) -> JobPage:
        """Return a page of a tenant's jobs, newest first, as long as they are kept. `FilterOptions` lists the filters.

        `after` is the `next_after` of the page before, with the same filter. A page may have fewer jobs than `limit`
        although more follow. Raises RequestError for a wrong part, limit or cursor.
        """
        wanted = JobFilter.of(jobs, tenant=tenant or self._tenant)
        return await self.listed(wanted, after=after, limit=limit)

    async def listed(self, wanted: JobFilter, *, after: str | None = None, limit: int = 20) -> JobPage:
        """Return a page of the jobs that a filter names, of any tenant, as `jobs` does."""
        return await self.servers.jobs(wanted, after, limit)

    async def completions_cursor(self, *, pool: str | None = None, tenant: str | None = None) -> str:
        """Return the present end of the tenant's completions. Taken before a submission, it misses no completion."""
        return str(await self.feed.cursor(tenant or self._tenant, pool))

    async def completions(
        self, after: str | None = None, *, tag: str | None = None, pool: str | None = None, tenant: str | None = None
    ) -> AsyncGenerator[tuple[str, Completion], None]:
        """Yield the tenant's jobs as they end, each once, with the cursor at which another call continues.

        Without a cursor it begins now. Tasks and rows of batches are not among the jobs. If the cursor is too old, or
        Redis lost writes, the job list fills the gap, and jobs may come again. Raises RequestError.
        """
        owner, checked = tenant or self._tenant, checked_tag(tag)
        start = await self.feed.cursor(owner, pool) if after is None else CompletionCursor.parse(after, owner, pool)
        async for behind, completion in self.feed.completions(start, checked):
            yield str(behind), completion

    def as_completed(
        self, jobs: Iterable[AsyncJob | str], *, timeout: float | None = None, check: bool = True
    ) -> AsyncGenerator[Result, None]:
        """Yield the results of jobs, handles or ids of one tenant, as they end. They share one reader of completions.

        `check` and `timeout` are those of `AsyncJob.result`, for all jobs together. The jobs go on after an error.
        """
        handles = [job if isinstance(job, AsyncJob) else self._handle(job) for job in jobs]
        return as_completed(self.feed, handles, timeout_s=timeout, check=check)

    async def cancel(self, job_id: str, *, tenant: str | None = None) -> str:
        """Cancel a job and return its state; see `AsyncJob.cancel`."""
        return await self._source(job_id, tenant, None).cancel()

    async def ack(self, *job_ids: str, tenant: str | None = None) -> int:
        """Free the results of ended jobs, which the caller has stored. Return how many this call has freed.

        Otherwise a result takes memory in Redis for a day. State, usage and idempotency key stay that long. Ids of
        other jobs are ignored. `generate`, `map` and `batch run` acknowledge their jobs themselves.
        """
        self.servers.directory.patience.require_open()
        return await self.servers.ack(job_ids, tenant or self._tenant)

    async def pools(self, *, renewed: bool = False) -> dict[str, ServedPool]:
        """Return every announced model by pool, at most a second old; pools with a live node come first.

        `renewed` fetches them anew, for a caller that misses a model in the copy. It waits up to a tenth of a second.
        """
        return await self.servers.pools(CachedState.renewed if renewed else CachedState.get)

    async def pressure(self, pool: str) -> PoolPressure:
        """Return a pool's live nodes and backlog, at most a quarter of a second old."""
        return await self.servers.of(pool).admissions.of(pool).get()

    async def api_keys(self, *, patience_s: float | None = None) -> dict[str, ApiKey]:
        """Return every API key by id, two seconds old at most; after `patience_s` without an answer, the last known."""
        return await self.servers.api_keys(patience_s)

    async def warn_of_eviction(self) -> None:
        """Log a warning if a Redis may evict keys."""
        await asyncio.gather(*(warn_of_eviction(one.redis) for one in self.servers.reachable))

    async def usage(self, query: UsageQuery, *, after: str | None = None, limit: int = MAX_PAGE_ROWS) -> UsagePage:
        """Return a page of a report of used tokens. `after` is the `next_after` of the page before."""
        return await self.servers.usage(query, after, limit)

    async def pool_stats(self) -> tuple[list[PoolStats], RedisState]:
        """Return the stats of all pools whose server answers, and the state of the directory's Redis."""
        return await self.servers.stats(READ_PATIENCE_S), await self.servers.directory.stats.redis_state()

    def _handle(self, job_id: str, tenant: str | None = None, durability: Durability | None = None) -> AsyncJob:
        return AsyncJob(self._source(job_id, tenant, durability), self.servers.of_job(job_id).inbox)

    def _source(
        self, job_id: str, tenant: str | None, durability: Durability | None, submission: Submission | None = None
    ) -> JobSource:
        if not is_job_id(job_id):
            raise NotFoundError(f"no job {job_id[:100]!r}", code="job_not_found")
        server = self.servers.of_job(job_id)
        parts, reads = (server.broker, server.inbox, server.queue_watch), server.reads(durability)
        if submission is None:
            return JobSource(*parts, job_id, tenant or self._tenant, reads=reads)
        kept = KeptSubmission(submission, self._kept)
        return JobSource(*parts, job_id, submission.job.tenant, kept, job=submission.job, reads=reads)

    async def _enqueue(self, submission: Submission) -> AsyncJob:
        job, server = submission.job, self.servers.of(submission.job.pool)
        inbox, feed = server.inbox, server.inbox.feed(job.id)
        if (reads := server.reads(job.token_durability)) is not None:
            await reads.check()
        # Chunks may arrive before the answer, so the first reader's mailbox opens before the call.
        box = inbox.open_box(feed, is_held=reads is not None)
        try:
            submitted = await server.broker.submit(submission, inbox.name)
            server.renewal.recent.accepted(submission, submitted, inbox.feed)
        except BaseException:
            inbox.close_box(feed, box)
            raise
        if submitted.job_id != job.id:
            inbox.close_box(feed, box)
            known = replace(submission, job=job.model_copy(update={"id": submitted.job_id}))
            return AsyncJob(self._source(submitted.job_id, None, job.token_durability, known), inbox)
        if submitted.existed or not submitted.pushed:
            box.nudge()
        return AsyncJob(self._source(job.id, None, job.token_durability, submission), inbox, first_box=box)
