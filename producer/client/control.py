"""Steering of accepted jobs, one by one or all that a filter names, and pauses: `AsyncClient.control`; dead letters."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import secrets
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol, Unpack

from penstock.contract.durations import Span, seconds_of
from penstock.contract.errors import (
    BusyError,
    ConflictError,
    DamagedRecordError,
    NotFoundError,
    PenstockError,
    UnavailableError,
)
from penstock.contract.job import JobKey, SubmitOptions, is_job_id, pool_of
from penstock.contract.job_actions import (
    STATES_OF,
    ActionName,
    BulkReport,
    FilterOptions,
    JobChange,
    JobFilter,
    change_error,
    checked_class,
    require_filter,
    retry_id,
)
from penstock.contract.pauses import Pause, pause_names
from penstock.contract.priority import ClassName, Priority
from penstock.contract.tenant import Terms
from penstock.producer.client.job import AsyncJob
from penstock.producer.client.request import Prompt
from penstock.producer.client.servers import QueueServer, QueueServers
from penstock.producer.client.webhooks import Webhooks
from penstock.queue.broker.connection import ignoring_retried_errors
from penstock.queue.broker.job_lists import DeadLetter
from penstock.queue.broker.jobs import JobStatus
from penstock.queue.broker.producer import Submitted
from penstock.queue.broker.steering import MAX_STEP_JOBS, BulkRequest, HeldBulk, Steering, report_of
from penstock.queue.wire import Request, WireError
from penstock.runtime.event_loop import cancel_until_done

_LOG = logging.getLogger(__package__)
_PAGE_JOBS = 64
"""Jobs that one look at the lists brings for the steps of a bulk action."""
LOOK_S = 2.0
"""Seconds between two looks for bulk actions that no process continues."""
_WATCH_S = 0.25
"""Seconds between two looks at an action that another process does."""
_STOP_WAIT_S = 60.0
"""Seconds for which the end of an action waits for jobs that it asked to stop. A lost node takes the longest."""
_MAX_PAUSE_S = 5.0
"""Seconds after which a step that a limit refused is tried again, so that the lease is renewed in time."""


class _Submits(Protocol):
    async def __call__(self, prompt: Prompt, /, **options: Unpack[SubmitOptions]) -> Submitted: ...


def retry_key(job_id: str) -> str:
    """Return the idempotency key of a job's retry, which makes it the only one."""
    return f"retry:{job_id}"


def request_options(request: Request) -> tuple[Prompt, SubmitOptions]:
    """Return prompt and options of a job that repeats a request. Model, owner, class and names are not among them."""
    forms = (request.prompt, request.prompt_token_ids, request.messages)
    options: SubmitOptions = {
        "tools": request.tools,
        "chat_template_kwargs": request.chat_template_kwargs,
        "adapter": None if request.adapter is None else request.adapter.name,
        "params": None if request.task is not None else request.params,
        "task": request.task,
        "lower_max_tokens": request.max_total_tokens is not None,
        "return_progress": request.return_progress,
        "needs_reader": False,
    }
    return next(form for form in forms if form is not None), options


def retry_options(
    job_id: str, request: Request, *, tags: Sequence[str] = (), metadata: Any = None
) -> tuple[Prompt, SubmitOptions]:
    """Return prompt and options of a job that repeats another one's request. Its owner and class are not among them."""
    prompt, options = request_options(request)
    options |= {
        "model": pool_of(job_id),
        "tags": tags,
        "metadata": metadata,
        "retry_of": job_id,
        "idempotency_key": retry_key(job_id),
    }
    return prompt, options


class JobControl:
    """A client's means to steer accepted jobs. Every method raises UnavailableError when Redis is unreachable.

    `tenant`: whose jobs; by default the client's.
    """

    def __init__(
        self, servers: QueueServers, submit: _Submits, webhooks: Webhooks, *, tenant: str, terms: Terms
    ) -> None:
        self._servers = servers
        self._submit = submit
        self._webhooks = webhooks
        self._tenant = tenant
        self._terms = terms
        self._begun = asyncio.Event()

    async def reschedule(self, job_id: str, not_before_s: Span, *, tenant: str | None = None) -> None:
        """Let a job wait that no node runs, for these seconds from now on, or until a datetime; 0 queues it now.

        Raises NotFoundError, ConflictError for a running or ended job, and RequestError for a time behind its deadline.
        """
        await self.change(
            job_id, JobChange("reschedule", not_before_s=seconds_of("not_before_s", not_before_s)), tenant=tenant
        )

    async def change_class(
        self,
        job_id: str,
        priority: Priority | ClassName | None = None,
        *,
        background: bool | None = None,
        tenant: str | None = None,
    ) -> None:
        """Give a job that no node runs another class, or make it background or foreground work. None keeps either.

        It keeps its age. Raises NotFoundError, and ConflictError for a running or ended job.
        """
        change = JobChange("change_class", priority=checked_class(priority), background=background)
        await self.change(job_id, change, tenant=tenant)

    async def change(self, job_id: str, change: JobChange, *, tenant: str | None = None) -> None:
        """Reschedule one job, or change its class; see `reschedule` and `change_class`."""
        if not is_job_id(job_id):
            raise NotFoundError(f"no job {job_id[:100]!r}", code="job_not_found", param="job_id")
        await self._servers.of_job(job_id).steering.change(job_id, tenant or self._tenant, change)

    async def retry(self, job_id: str, *, tenant: str | None = None, terms: Terms | None = None) -> Submitted:
        """Submit the request of a job that failed, expired or was canceled as a new job, and return its id and state.

        The new job has the same class, tags and metadata, no deadline, and goes on without a reader. A job has one
        retry: a repeated call returns it. `terms`: as for `submit`. Raises NotFoundError (also code `request_expired`),
        ConflictError if the job has not ended or succeeded, and what `submit` raises.
        """
        if not is_job_id(job_id):
            raise NotFoundError(f"no job {job_id[:100]!r}", code="job_not_found", param="job_id")
        status = await self._servers.of_job(job_id).broker.status(job_id, tenant or self._tenant)
        request, outcome = await self._retriable(status)
        if request is None:
            if outcome == "request_expired" and (earlier := await self._earlier_retry(status)) is not None:
                return earlier
            raise change_error(job_id, outcome) or NotFoundError(f"no job {job_id}", code="job_not_found")
        return await self._submit_again(status, request, terms or self._terms)

    async def bulk(
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
        """Cancel, retry, reschedule or change the class of all jobs that a filter names, and return the report.

        `jobs` is the filter, as for `AsyncClient.jobs`: `pool`, `state`, `priority`, `background`, `tag`,
        `submitted_after`, `submitted_before`. Without a state it names those that the action can change. The action
        covers jobs that were accepted before it. It is stored in Redis: if this process dies, a gateway continues it.
        With `dry_run` nothing changes, and the report tells what would. A cancellation needs a part of a filter, or
        `all_jobs`. Raises RequestError for a wrong part, and
        BusyError for too many open actions.
        """
        begins_in_s = None if not_before_s is None else seconds_of("not_before_s", not_before_s)
        change = JobChange(action, begins_in_s, checked_class(to_priority), to_background)
        wanted = JobFilter.of(jobs, tenant=tenant or self._tenant)
        bulk_id = await self.start(change, wanted, owner=tenant or self._tenant, dry_run=dry_run, all_jobs=all_jobs)
        return await self.finished(bulk_id, wanted, tenant=tenant)

    async def finished(self, bulk_id: str, wanted: JobFilter, *, tenant: str | None = None) -> BulkReport:
        """Do a bulk action to its end, as far as no other process does, and return its report.

        The report is that of a running action if jobs that were asked to stop have not ended after _STOP_WAIT_S.
        """
        loop, stops_at_s = asyncio.get_running_loop(), math.inf
        while (report := await self.report(bulk_id, tenant=tenant)).state == "running":
            await self.continue_bulk(bulk_id, await self._pools_of(wanted))
            if (report := await self.report(bulk_id, tenant=tenant)).state != "running":
                break
            if report.num_asked_to_stop:
                stops_at_s = min(stops_at_s, loop.time() + _STOP_WAIT_S)
            if loop.time() >= stops_at_s:
                break
            await asyncio.sleep(_WATCH_S)
        return report

    async def start(
        self,
        change: JobChange,
        wanted: JobFilter,
        *,
        owner: str,
        terms: Terms | None = None,
        dry_run: bool = False,
        all_jobs: bool = False,
    ) -> str:
        """Store a bulk action and return its id. `continue_bulk` or any gateway then does it.

        Raises RequestError for a cancellation without a part of a filter, BusyError for too many open actions, and
        NotFoundError if the filter names no pool. Each pool has its own
        record of the action, so an action on pools of several servers needs all of them for a moment.
        """
        require_filter(change, wanted, all_jobs=all_jobs or dry_run)
        states = wanted.states or STATES_OF[change.action]
        parts = {**wanted.as_object(), "state": states}
        request = BulkRequest(change, JobFilter.of(parts, tenant=wanted.tenant), terms or self._terms)
        bulk_id, is_stored = secrets.token_hex(16), False
        for pool in await self._pools_of(wanted):
            steering = self._servers.of(pool).steering
            is_stored |= await steering.create(pool, bulk_id, owner, request, is_dry_run=dry_run)
        if not is_stored:
            raise NotFoundError(f"no pool {wanted.pool or ''}".rstrip(), code="model_not_found", param="pool")
        self._begun.set()
        return bulk_id

    async def report(self, bulk_id: str, *, tenant: str | None = None) -> BulkReport:
        """Return what a bulk action has done so far. Raises NotFoundError, a day after its end too."""
        found = [part for one in self._all_servers() for part in await one.steering.parts_of(bulk_id)]
        return report_of(bulk_id, found, tenant or self._tenant)

    async def running(self, *, tenant: str | None = None) -> list[BulkReport]:
        """Return the reports of the bulk actions that a tenant has begun and that have not ended, oldest first."""
        found = [key for one in self._all_servers() for key in await _open_bulks(one.steering)]
        reports = list[BulkReport]()
        for bulk_id in dict.fromkeys(bulk_id for _, bulk_id in found):
            with suppress(NotFoundError, DamagedRecordError):
                reports.append(await self.report(bulk_id, tenant=tenant))
        return sorted(reports, key=lambda report: report.begun_ms)

    async def stop(self, bulk_id: str, *, tenant: str | None = None) -> BulkReport:
        """Give up a bulk action where it is, and return its report. Raises NotFoundError."""
        report = await self.report(bulk_id, tenant=tenant)
        for pool in await self._pools_of(JobFilter.of(report.jobs, tenant=None)):
            await self._servers.of(pool).steering.end(pool, bulk_id)
        return await self.report(bulk_id, tenant=tenant)

    async def continue_bulk(self, bulk_id: str, pools: Sequence[str]) -> None:
        """Do a bulk action in these pools, as far as no other process does."""
        holder = secrets.token_hex(8)
        for pool in pools:
            held = await self._servers.of(pool).steering.claim(pool, bulk_id, holder)
            if held is not None:
                await self._walk(held)

    async def keep_continuing(self) -> None:
        """Do the bulk actions that this client starts, and those that no other process does, until canceled."""
        tasks: dict[tuple[str, str], asyncio.Task[None]] = {}
        try:
            while True:
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S * random.uniform(0.75, 1.25)):
                        await self._begun.wait()
                self._begun.clear()
                tasks = {key: task for key, task in tasks.items() if not task.done()}
                for server in self._servers.reachable:
                    with ignoring_retried_errors(_LOG):
                        for key in await _open_bulks(server.steering):
                            if key not in tasks:
                                tasks[key] = asyncio.create_task(self._continued(*key), name="penstock bulk action")
        finally:
            await cancel_until_done(tasks.values())

    async def _continued(self, pool: str, bulk_id: str) -> None:
        try:
            await self.continue_bulk(bulk_id, [pool])
        except UnavailableError:
            return  # it is tried again
        except PenstockError as error:
            _LOG.warning("a bulk action cannot be continued", extra={"bulk_id": bulk_id, "reason": error.reason})
        except Exception:
            # A defect. Other bulk actions go on, and this one is tried again.
            _LOG.exception("a step of a bulk action failed", extra={"bulk_id": bulk_id})

    async def pause(
        self,
        pool: str,
        *,
        tenant: str | None = None,
        priority: Priority | ClassName | None = None,
        background: bool | None = None,
    ) -> list[Pause]:
        """Let nodes take no job of a pool, of a class or kind of work of it, or of a tenant. Return all pauses.

        Jobs are accepted meanwhile, running ones go on, and deadlines pass. Raises NotFoundError and RequestError.
        """
        names = pause_names(tenant, checked_class(priority), background)
        return await self._servers.of(pool).steering.pause(pool, names, on=True)

    async def resume(
        self,
        pool: str,
        *,
        tenant: str | None = None,
        priority: Priority | ClassName | None = None,
        background: bool | None = None,
    ) -> list[Pause]:
        """End what `pause` began with the same arguments, and return what is still paused."""
        names = pause_names(tenant, checked_class(priority), background)
        return await self._servers.of(pool).steering.pause(pool, names, on=False)

    async def paused(self, pool: str | None = None) -> list[Pause]:
        """Return what is paused, of a pool or of all."""
        pools = await self._pools_of(JobFilter(pool=pool))
        asked = self._servers.grouped(pools)
        return [pause for one, some in asked for pause in await one.steering.paused(some)]

    async def _pools_of(self, wanted: JobFilter) -> list[str]:
        """Return the pools of a filter's jobs."""
        if wanted.pool is not None:
            return [wanted.pool]
        return [pool for one in self._all_servers() for pool in await one.steering.pools_of(wanted)]

    def _all_servers(self) -> Sequence[QueueServer]:
        """Return all servers. Raises UnavailableError if one of several is away."""
        return self._servers.require_all() if self._servers.is_split else self._servers.all

    async def _walk(self, held: HeldBulk) -> None:
        """Do the steps of an action in a pool, until its end or until another process has its lease."""
        wanted, cursor, server = held.request.jobs, held.cursor, self._servers.of(held.pool)
        while True:
            tenants = [wanted.tenant] if wanted.tenant is not None else await server.lists.tenants_of(held.pool)
            tenant, _, place = cursor.partition("/")
            # A tenant without jobs is gone from the list.
            tenants = [name for name in tenants if name >= tenant]
            if not tenants:
                await server.steering.step(held, [], cursor=cursor, to=cursor, is_last=True)
                return
            if tenants[0] != tenant:
                tenant, place = tenants[0], ""
            part = JobFilter.of({**wanted.as_object(), "pool": held.pool}, tenant=tenant)
            job_ids, last = await server.lists.find(part, place, _PAGE_JOBS)
            behind = f"{tenants[1]}/" if len(tenants) > 1 else None
            steps = [job_ids[at : at + MAX_STEP_JOBS] for at in range(0, len(job_ids), MAX_STEP_JOBS)] or [[]]
            for number, step in enumerate(steps, 1):
                to, is_last = f"{tenant}/{step[-1].rpartition('.')[2] if step else place}", False
                if number == len(steps):
                    to = f"{tenant}/{last}" if last is not None else behind or to
                    is_last = last is None and behind is None
                if not await self._step(held, step, cursor, to, is_last=is_last):
                    return
                cursor = to
            if is_last:
                return

    async def _step(self, held: HeldBulk, job_ids: Sequence[str], cursor: str, to: str, *, is_last: bool) -> bool:
        known, steering = dict[str, str](), self._servers.of(held.pool).steering
        while held.request.change.action == "retry" and len(known) < len(job_ids):
            left = [job_id for job_id in job_ids if job_id not in known]
            found = await asyncio.gather(*(self._retried(held, job_id) for job_id in left), return_exceptions=True)
            if errors := [one for one in found if isinstance(one, BaseException)]:
                raise errors[0]
            known |= {job_id: one for job_id, one in zip(left, found, strict=True) if isinstance(one, str)}
            # A limit refused the others: they are tried again, and this renews the lease.
            if None in found and not await steering.step(held, [], cursor=cursor, to=cursor):
                return False
        outcomes = [known[job_id] for job_id in job_ids if job_id in known]
        return await steering.step(held, job_ids, cursor=cursor, to=to, is_last=is_last, outcomes=outcomes)

    async def _retried(self, held: HeldBulk, job_id: str) -> str | None:
        """Retry a job of a bulk action. Return the outcome, as change.lua names it; None if a limit refuses it now."""
        try:
            server = self._servers.of_job(job_id)
            status = await server.broker.status(job_id, held.request.jobs.tenant or await server.lists.owner(job_id))
        except NotFoundError:
            return "NOT_FOUND"
        if status.accepted_ms > held.begun_ms:
            return "later"
        request, outcome = await self._retriable(status)
        if request is None or held.is_dry_run:
            return "over" if outcome == "job_succeeded" else outcome
        new_id = retry_id(job_id, held.bulk_id, held.begun_ms)
        try:
            submitted = await self._submit_again(status, request, held.request.terms, new_id)
        except BusyError as error:
            await asyncio.sleep(min(_MAX_PAUSE_S, error.retry_after_ms / 1000))
            return None
        except ConflictError:
            return "over"
        except UnavailableError:
            raise
        except PenstockError as error:
            return error.code
        return "changed" if submitted.job_id == new_id else "over"

    async def _retriable(self, status: JobStatus) -> tuple[Request | None, str]:
        """Return the request of a job that can be retried, else None and why not."""
        if status.outcome is None:
            return None, "job_open"
        if status.outcome.state == "succeeded":
            return None, "job_succeeded"
        with suppress(WireError):
            if (request := await self._servers.of_job(status.job_id).steering.request(status.job_id)) is not None:
                return request, "changed"
        return None, "request_expired"

    async def _earlier_retry(self, status: JobStatus) -> Submitted | None:
        """Return the retry of a job whose request is gone, such as that of a purged dead letter."""
        one = self._servers.of_job(status.job_id)
        key = JobKey(status.tenant, retry_key(status.job_id))
        new_id = await one.known_jobs.named(key, pool_of(status.job_id))
        if new_id is None:
            return None
        new = await one.broker.status(new_id, status.tenant)
        return Submitted(new.state, 0, pushed=False, job_id=new_id, existed=True)

    async def _submit_again(
        self, status: JobStatus, request: Request, terms: Terms, new_id: str | None = None
    ) -> Submitted:
        prompt, options = retry_options(status.job_id, request, tags=status.tags, metadata=status.metadata)
        options |= {
            "custom_id": status.custom_id,
            "webhooks": await self._webhooks.known_of(status.webhooks, status.tenant),
            "channel": status.own_channel,
            "priority": status.priority,
            "background": status.is_background,
            "tenant": status.tenant,
            "terms": terms,
            "job_id": new_id,
            "queue_without_node": True,
        }
        return await self._submit(prompt, **options)


async def _open_bulks(steering: Steering) -> list[tuple[str, str]]:
    """Return the pools of a server with the ids of their open actions."""
    pools = await steering.pools_of(JobFilter())
    return [(pool, one) for pool in pools for one in await steering.open_bulks(pool)]


class DeadLetterBox:
    """A client's access to the dead letters of all pools, as `AsyncClient.dead`."""

    def __init__(self, servers: QueueServers, submit: Callable[..., Awaitable[AsyncJob]]) -> None:
        self._servers = servers
        self._submit = submit

    async def newest(self, pool: str, limit: int = 100) -> list[DeadLetter]:
        """Return a pool's dead letters, newest first."""
        return await self._servers.of(pool).dead_letters.newest(pool, limit)

    async def get(self, job_id: str) -> DeadLetter:
        """Return one dead letter. Raises NotFoundError."""
        return await self._servers.of_job(job_id).dead_letters.get(job_id)

    async def request(self, job_id: str) -> Request:
        """Return the job's request. Raises NotFoundError."""
        return await self._servers.of_job(job_id).dead_letters.request(job_id)

    async def purge(self, job_ids: Sequence[str]) -> int:
        """Delete dead letters and their requests. Returns how many were dead letters."""
        return sum([await self._servers.of_job(job_id).dead_letters.purge([job_id]) for job_id in job_ids])

    async def purge_all(self, pool: str) -> int:
        """Delete all dead letters of a pool, also those whose jobs' records are gone. Returns how many there were."""
        return await self._servers.of(pool).dead_letters.purge_all(pool)

    async def retry(self, job_id: str) -> AsyncJob:
        """Submit a dead letter's request as a new job for the same tenant, and purge the letter.

        A call after an interrupted one returns the same new job. Raises NotFoundError, and what `AsyncClient.submit`
        raises.
        """
        letter, request = await self.get(job_id), await self.request(job_id)
        prompt, options = retry_options(job_id, request)
        job = await self._submit(
            prompt,
            **options,
            priority=letter.priority,
            background=letter.is_background,
            tenant=letter.tenant,
            terms=Terms(weight=letter.weight),
        )
        await self.purge([job_id])
        return job
