"""The asynchronous client. The gateway and the synchronous client build on it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import replace
from types import TracebackType
from typing import Self, Unpack, cast

from penstock.contract.errors import ConfigError, NotFoundError, ProtocolVersionError, RequestError, UnavailableError
from penstock.contract.job import JobDef, JobKey, SubmitOptions, is_job_id
from penstock.contract.output import TERMINAL_STATES, Chunk, Result
from penstock.contract.priority import Priority, class_not_allowed
from penstock.contract.response_record import NO_RESPONSE
from penstock.contract.tenant import Terms
from penstock.producer.client.dead import DeadLetterBox
from penstock.producer.client.inbox import ClientInbox
from penstock.producer.client.job import AsyncJob, JobSource
from penstock.producer.client.many import ManyCalls
from penstock.producer.client.pools import ReportCalls
from penstock.producer.client.request import Prompt, build_job, choose_pool, fitting_pools, job_key_of
from penstock.producer.client.responses import StoredResponses
from penstock.producer.client.settings import ClientSettings, ClientStats
from penstock.producer.client.signature import with_options
from penstock.producer.client.tasks import TaskCalls
from penstock.producer.client.waiting import QueueWatch
from penstock.queue.admission import estimate_cost, rate_tokens
from penstock.queue.broker.connection import Retries, connect, not_reached, refused_at
from penstock.queue.broker.dead_letters import DeadLetters
from penstock.queue.broker.jobs import JobLists, JobPage, QueuePositions, ResponseBroker
from penstock.queue.broker.producer import JobStatus, KnownJobs, ServedPool, Submission, Submitted
from penstock.queue.keys import PROTOCOL_VERSION
from penstock.queue.results import PackedResult
from penstock.runtime.settings import redis_url_of, without_password

MAX_TOOLS_CHARS_ON_LOOP = 16 << 10


class AsyncClient(TaskCalls, ManyCalls, ReportCalls):
    """Submit jobs and stream their chunks.

        async with AsyncClient("redis://localhost") as client:
            async for chunk in client.stream("Once upon a time", max_tokens=64):
                print(chunk.text, end="")

    `redis_url` defaults to $PENSTOCK_REDIS_URL, else to the Redis of this user's `penstock serve`. `tenant` owns the
    jobs that name no other tenant. One client serves a whole process, and belongs to one event loop.
    """

    def __init__(
        self, redis_url: str | None = None, *, tenant: str = "default", settings: ClientSettings | None = None
    ) -> None:
        url = redis_url_of(redis_url)
        settings = settings or ClientSettings.load()
        self.stats = ClientStats()
        self._url = without_password(url)
        self._tenant = tenant
        self._terms = Terms(weight=settings.weight, memory_percent=settings.memory_percent)
        self._highest_class = Priority.of(settings.highest_class)
        self._queues_without_node = settings.queue_without_node
        ManyCalls.__init__(self, settings.outage_s)
        ReportCalls.__init__(self, connect(url), Retries(settings.outage_s))
        self._known_jobs = KnownJobs(self._redis)
        self._job_lists = JobLists(self._redis)
        self._inbox = ClientInbox(self._redis, self._broker, settings, self.stats)
        self.dead = DeadLetterBox(self._retries, DeadLetters(self._redis), self.submit)
        self.responses = StoredResponses(self._retries, ResponseBroker(self._redis), self._broker)
        self._queue_watch = QueueWatch(self._retries, QueuePositions(self._redis), self._admissions)
        self._connecting = asyncio.Lock()
        self._is_closed = False

    async def connect(self) -> Self:
        """Subscribe to this client's inbox. `async with` does it too, and a second call does nothing.

        Raises UnavailableError if Redis is unreachable, or if the client was closed, which is final.
        """
        async with self._connecting:
            if self._is_closed:
                raise UnavailableError("the client was closed: make another one", code="client_closed")
            if not self._retries.is_open:
                try:
                    await self._inbox.open()
                except UnavailableError as error:
                    raise not_reached(error, self._url) from None
                except ConfigError as error:
                    raise refused_at(error, self._url) from None
                self._retries.is_open = True
        return self

    async def close(self) -> None:
        """End every stream, task and connection of this client. Only `background` jobs continue without a reader."""
        self._is_closed = True
        await self.close_runs()
        self._retries.is_open = False
        await self._pools.close()
        await self._queue_watch.close()
        await self._admissions.close()
        await self._inbox.close()
        await self._redis.aclose()

    async def __aenter__(self) -> Self:
        return await self.connect()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "connected" if self._retries.is_open else "not connected"
        return f"<AsyncClient {self._url} tenant={self._tenant} {state}>"

    @property
    def is_alive(self) -> bool:
        """Whether this client is connected and receives chunks. Once this is false, make another client."""
        return self._retries.is_open and self._inbox.is_running

    async def served_pool(
        self, *names: str | None, adapter: str | None = None, key: JobKey | None = None
    ) -> ServedPool:
        """Return the pool that `choose_pool` chooses for the names. Raises what `choose_pool` raises.

        If another fitting pool already has a job of this key, that pool is returned, also if it has no live node now.
        """
        known, chosen = list((await self._pools.recent()).values()), None
        with suppress(NotFoundError, UnavailableError, ProtocolVersionError):
            chosen = choose_pool(known, *names, adapter=adapter, key=key)
        if chosen is None:
            # The model's first node may have joined since.
            known = list((await self.pools(renewed=True)).values())
            chosen = choose_pool(known, *names, adapter=adapter, key=key)
        if key is None:
            return chosen
        # Pools may have joined or died since a job of this key was submitted, so the ranks may choose another pool now.
        fitting = fitting_pools(known, *names, adapter=adapter)
        pools = {pool.pool: pool for pool in (chosen, *fitting) if pool.protocol_version == PROTOCOL_VERSION}
        if len(pools) == 1:
            return chosen
        return pools.get(await self._retries.call(lambda: self._known_jobs.pool_of(key, list(pools))), chosen)

    @with_options()
    async def submit(self, prompt: Prompt, **options: Unpack[SubmitOptions]) -> AsyncJob:
        """Check, admit and enqueue a job, and return its handle. `SubmitOptions` describes each option.

        `prompt` is text, token ids or the messages of a chat. A `background` job, the default, goes on if this
        process ends. `client.attach(job.id)` reads it from any process, and `job.cancel()` ends it.

        Raises RequestError (`param` names the wrong argument), BusyError (retry after `retry_after_ms`),
        ConflictError (the id or idempotency key belongs to another request), UnavailableError (no node, or no Redis).
        """
        with self._admissions.counting(self.stats.decisions):
            return await self._enqueue(await self._admitted(prompt, options))

    @with_options()
    async def submit_unread(self, prompt: Prompt, **options: Unpack[SubmitOptions]) -> Submitted:
        """Submit a job as `submit` does, but do not read it here. Return its id and state.

        Unless it is `background`, it is canceled soon if no other reader attaches to it.
        """
        with self._admissions.counting(self.stats.decisions):
            submission = await self._admitted(prompt, options)
            return await self._retries.call(lambda: self._broker.submit(submission))

    async def _admitted(self, prompt: Prompt, options: SubmitOptions) -> Submission:
        """Check and admit a job."""
        self._retries.require_open()
        names, key = (options.get("model"), options.get("job_id")), job_key_of(options, self._tenant)
        record = await self.served_pool(*names, adapter=options.get("adapter"), key=key)
        tools = options.get("tools")
        if isinstance(tools, str) and len(tools) > MAX_TOOLS_CHARS_ON_LOOP:
            # The tools' schemas are parsed several times; on a thread they do not hold the event loop.
            job = await asyncio.to_thread(build_job, prompt, options, record, self._tenant)
        else:
            job = build_job(prompt, options, record, self._tenant)
        if job.priority < self._highest_class:
            raise class_not_allowed(job.priority, self._highest_class, "this client (highest_class)")
        admission = self._admissions.of(record.pool)
        cost = estimate_cost(job, record, (await admission.recent()).nodes)
        await self._retries.call(lambda: self._inbox.ensure_heartbeat(record.pool))
        wish = options.get("queue_without_node")
        needs_node = not (self._queues_without_node if wish is None else wish)
        try:
            if needs_node:
                await admission.require_node()
        except UnavailableError as refusal:
            # A repeated submission adds no job, so it needs no node.
            if refusal.code == "redis_away" or not await self._is_repeated(job, options):
                raise
        channel, terms = options.get("channel", False), options.get("terms") or self._terms
        tokens = rate_tokens(job, record.max_model_len)
        return Submission(job, cost, channel, terms, options.get("response") or NO_RESPONSE, tokens)

    async def _is_repeated(self, job: JobDef, options: SubmitOptions) -> bool:
        has_name = job.idempotency_key or options.get("job_id")
        return bool(has_name) and await self._retries.call(lambda: self._known_jobs.has(job))

    @with_options(background=False)
    async def stream(self, prompt: Prompt, **options: Unpack[SubmitOptions]) -> AsyncGenerator[Chunk, None]:
        """Submit a job and yield its chunks. Raises what `submit` and `AsyncJob.stream` raise.

        If the caller stops reading, such as by Ctrl-C, the job is canceled 5 s later, unless it is `background`.
        """
        job = await self.submit(prompt, **cast(SubmitOptions, {"background": False, **options}))
        async with aclosing(job.stream()) as chunks:
            async for chunk in chunks:
                yield chunk

    async def attach(self, job_id: str, *, after: int = -1, tenant: str | None = None) -> AsyncJob:
        """Return a handle on a job that any process submitted, for reading the chunks after index `after`.

        Raises NotFoundError if Redis does not know the job, or if it belongs to another tenant.
        """
        if after < -1:
            raise RequestError("after must be -1 (all of the job) or the index of a chunk", param="after")
        source = self._source(job_id, tenant)
        box = self._inbox.open_box(source.feed)
        try:
            attached = await source.attach()
        except BaseException:
            self._inbox.close_box(source.feed, box)
            raise
        if attached.num_chunks != after + 1 or attached.state in TERMINAL_STATES:
            box.nudge()
        return AsyncJob(source, self._inbox, after=after, first_box=box)

    async def result(
        self,
        job_id: str,
        *,
        timeout: float | None = None,  # noqa: ASYNC109
        check: bool = True,
        tenant: str | None = None,
    ) -> Result:
        """Wait for a job's end and return its result; see `AsyncJob.result`."""
        return await AsyncJob(self._source(job_id, tenant), self._inbox).result(timeout=timeout, check=check)

    async def packed_result(self, job_id: str, *, tenant: str | None = None) -> PackedResult | None:
        """Return an ended job's result with parts that are decoded on access, or None while the job is open."""
        return await self._source(job_id, tenant).packed_result()

    async def status(self, job_id: str, *, tenant: str | None = None) -> JobStatus:
        """Return a job's state, for people."""
        return await self._source(job_id, tenant).status()

    async def jobs(
        self,
        *,
        tenant: str | None = None,
        pool: str | None = None,
        state: str | None = None,
        after: str | None = None,
        limit: int = 20,
    ) -> JobPage:
        """Return a page of a tenant's jobs, newest first, as long as their records are kept.

        `after` is the `next_after` of the page before. A page may have fewer jobs than `limit` although more follow.
        """
        owner = tenant or self._tenant
        return await self._retries.call(
            lambda: self._job_lists.page(owner, pool=pool, state=state, after=after, limit=limit)
        )

    async def cancel(self, job_id: str, *, tenant: str | None = None) -> str:
        """Cancel a job and return its state; see `AsyncJob.cancel`."""
        return await self._source(job_id, tenant).cancel()

    def _source(self, job_id: str, tenant: str | None, submission: Submission | None = None) -> JobSource:
        if not is_job_id(job_id):
            raise NotFoundError(f"no job {job_id[:100]!r}", code="job_not_found")
        parts = self._broker, self._retries, self._inbox, self._queue_watch
        return JobSource(*parts, job_id, tenant or self._tenant, submission)

    async def _enqueue(self, submission: Submission) -> AsyncJob:
        job, feed = submission.job, self._inbox.feed(submission.job.id)
        # Chunks may arrive before the answer, so the first reader's mailbox opens before the call.
        box = self._inbox.open_box(feed)
        try:
            submitted = await self._retries.call(lambda: self._broker.submit(submission, self._inbox.name))
        except BaseException:
            self._inbox.close_box(feed, box)
            raise
        if submitted.job_id != job.id:
            self._inbox.close_box(feed, box)
            known = replace(submission, job=job.model_copy(update={"id": submitted.job_id}))
            return AsyncJob(self._source(submitted.job_id, job.tenant, known), self._inbox)
        if submitted.existed or not submitted.pushed:
            box.nudge()
        return AsyncJob(self._source(job.id, job.tenant, submission), self._inbox, first_box=box)
