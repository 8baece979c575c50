"""Schedules of a tenant: jobs and batches that start by themselves, as `AsyncClient.schedules`. Gateways start them."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from itertools import islice
from typing import Any, Protocol, TypedDict, Unpack, cast

from pydantic import ValidationError
from redis.asyncio import Redis

from penstock.contract.durations import Span, seconds_of
from penstock.contract.errors import ConflictError, NotFoundError, RequestError, TooLargeError
from penstock.contract.job import JobDef, SubmitOptions
from penstock.contract.problems import request_error
from penstock.contract.schedule import (
    MAX_AHEAD_S,
    MAX_REQUEST_BYTES,
    MAX_TAGS_OF_SCHEDULE,
    MissedRule,
    OverlapRule,
    Schedule,
    ScheduledBatch,
    ScheduledJob,
    ScheduleRecord,
    ScheduleRun,
    Timing,
    new_schedule_id,
)
from penstock.contract.tasks import GENERATE
from penstock.contract.tenant import Terms
from penstock.producer.client.pools import naming_pool
from penstock.producer.client.request import Prompt, built_job
from penstock.producer.client.schedule_times import MAX_PENDING, check_timing, due_after, dues
from penstock.producer.client.webhooks import Caller, Webhooks
from penstock.queue import wire
from penstock.queue.broker.connection import Patience
from penstock.queue.broker.producer import ServedPool
from penstock.queue.broker.schedules import NEVER_MS, ScheduleStore
from penstock.queue.broker.submitting import first_words
from penstock.queue.files.file_records import FileRecords, no_file
from penstock.queue.job_cost import estimate_cost

SHOWN_RUNS = 5
"""Next runs that a schedule is shown with."""
MAX_SHOWN_RUNS = 100
_CHANGE_TRIES = 8
_OF_ONE_JOB = (
    *("job_id", "idempotency_key", "retry_of", "response", "channel", "not_before_s", "max_wait_s"),
    *("reader_grace_s", "needs_reader", "durability", "token_durability", "queue_without_node"),
)
"""The options of a job that a schedule cannot give to each of its jobs."""


class WhenOptions(TypedDict, total=False):
    """When a schedule is due, and what becomes of its runs, as keyword arguments.

    cron: minute, hour, day, month and day of the week, in the time `zone` (UTC by default).
    every_s: seconds between two runs, or a timedelta.
    at: the moment of one run: an aware datetime or Unix seconds.
    missed: which runs start whose time passed while no gateway ran: `one` (the default) the newest, `all`, or `skip`.
    overlap: what a run does while the run before goes on: `skip` (the default), `wait`, or `cancel` the run before.
    key_id: the API key on whose terms the runs start.
    """

    cron: str | None
    zone: str
    every_s: Span | None
    at: datetime | float | None
    name: str
    missed: MissedRule
    overlap: OverlapRule
    key_id: str


class ScheduleOptions(SubmitOptions, WhenOptions, total=False):
    """Keyword arguments of `Schedules.create`: those of the job, and those of the schedule."""


class FindsPools(Protocol):
    """Finds the pool of a job, as a submission does."""

    async def __call__(
        self,
        model: str | None = None,
        *,
        adapter: str | None = None,
        kind: str | None = None,
        hides_models: bool = False,
    ) -> ServedPool: ...


class Schedules:
    """A client's schedules. Every method raises UnavailableError when Redis is unreachable.

    Gateways start the runs, so without a running gateway they wait. `tenant`: whose schedules; by default the client's.
    """

    def __init__(
        self,
        redis: Redis,
        patience: Patience,
        served_pool: FindsPools,
        webhooks: Webhooks,
        files: FileRecords,
        clock: Callable[[], float],
        tenant: str,
        terms: Terms,
    ) -> None:
        """`clock` returns Redis's time in Unix seconds."""
        self.store = ScheduleStore(redis, patience)
        self._served_pool = served_pool
        self._webhooks = webhooks
        self._files = files
        self._tenant = tenant
        self._terms = terms
        self._clock = clock

    async def create(self, prompt: Prompt, **options: Unpack[ScheduleOptions]) -> Schedule:
        """Start a job at times that come again: by a cron line in a time zone, every so often, or once, `at` a moment.

        `options` are those of `submit` and of `WhenOptions`. The job is background work, unless they say otherwise, and
        no reader waits for it. Raises RequestError that names the wrong argument, and what `submit` raises.
        """
        of_schedule = _of_schedule(options)
        owner, timing = options.get("tenant") or self._tenant, self.timing_of(of_schedule)
        for one in _OF_ONE_JOB:
            if options.get(one) is not None:
                raise RequestError(f"{one}: a schedule cannot give this to each of its jobs", param=one)
        if len(options.get("tags") or ()) > MAX_TAGS_OF_SCHEDULE:
            message = f"tags: a schedule's jobs may have {MAX_TAGS_OF_SCHEDULE} tags; it adds one with its id"
            raise RequestError(message, param="tags")
        job, model = await self._built(prompt, options)
        request = wire.encode_request(job)
        if len(request) > MAX_REQUEST_BYTES:
            message = f"the request has {len(request)} bytes; the limit of a schedule is {MAX_REQUEST_BYTES}"
            raise TooLargeError(message, param="prompt")
        action = ScheduledJob(
            model=model,
            request=base64.b64encode(request).decode(),
            priority=int(job.priority),
            background=job.background,
            tags=job.tags,
            metadata=None if job.metadata is None else dict(job.metadata),
            custom_id=job.custom_id,
            webhooks=job.webhooks,
            deadline_s=None if job.deadline_ms is None else job.deadline_ms / 1000,
            ttl_s=None if job.ttl_ms is None else job.ttl_ms / 1000,
            in_feed=job.in_feed,
            words=first_words(job),
            terms=options.get("terms") or self._terms,
            key_id=of_schedule.get("key_id", ""),
        )
        return await self._create(action, timing, owner, of_schedule)

    async def create_batch(
        self,
        input_file_id: str,
        endpoint: str,
        *,
        completion_window: str = "24h",
        metadata: Mapping[str, str] | None = None,
        max_attempts: int | None = None,
        retry_backoff_s: float | None = None,
        tenant: str | None = None,
        **when: Unpack[WhenOptions],
    ) -> Schedule:
        """Start a batch over a stored file at times that come again; see `create`. With the endpoint `flow`, a flow.

        Raises NotFoundError if the tenant has no such file.
        """
        timing = self.timing_of(when)
        fields = {"input_file_id": input_file_id, "endpoint": endpoint, "completion_window": completion_window}
        rest = {"metadata": metadata, "max_attempts": max_attempts, "retry_backoff_s": retry_backoff_s}
        try:
            action = ScheduledBatch.model_validate({**fields, **rest, "key_id": when.get("key_id", "")})
        except ValidationError as error:
            raise request_error(error) from None
        try:
            await self._files.find(input_file_id, tenant or self._tenant)
        except NotFoundError:
            raise no_file(input_file_id, "input_file_id") from None
        return await self._create(action, timing, tenant or self._tenant, when)

    def timing_of(self, when: WhenOptions) -> Timing:
        """Return when a schedule is due. Raises RequestError that names the wrong argument."""
        now_ms = self._now_ms()
        timing = timing_of(when, now_ms)
        check_timing(timing, now_ms)
        return timing

    async def all(self, *, tenant: str | None = None) -> list[Schedule]:
        """Return all schedules, oldest first."""
        return await self.store.of(tenant or self._tenant)

    async def get(self, schedule_id: str, *, tenant: str | None = None) -> Schedule:
        """Return a schedule. Raises NotFoundError."""
        return await self.store.get(schedule_id, tenant or self._tenant)

    async def runs(self, schedule_id: str, *, tenant: str | None = None) -> list[ScheduleRun]:
        """Return the newest 100 runs of a schedule, the newest first. Raises NotFoundError."""
        return await self.store.runs(schedule_id, tenant or self._tenant)

    async def delete(self, schedule_id: str, *, tenant: str | None = None) -> None:
        """Delete a schedule. The jobs and batches that it started go on. Raises NotFoundError."""
        await self.store.delete(schedule_id, tenant or self._tenant)

    async def pause(self, schedule_id: str, *, tenant: str | None = None) -> Schedule:
        """Let a schedule be due no more, until it is resumed. A repeated call changes nothing. Raises NotFoundError."""

        def paused(known: Schedule, now_ms: int) -> Schedule:
            return known if known.paused_ms else replace(known, paused_ms=now_ms)

        return await self._change(schedule_id, tenant, paused)

    async def resume(self, schedule_id: str, *, tenant: str | None = None) -> Schedule:
        """Let a paused schedule be due again, from now on: times of the pause count as none. Raises NotFoundError."""

        def resumed(known: Schedule, now_ms: int) -> Schedule:
            if not known.paused_ms:
                return known
            return replace(known, paused_ms=0, next_ms=due_after(known.record.timing, now_ms) or 0)

        return await self._change(schedule_id, tenant, resumed)

    async def run_now(self, schedule_id: str, *, tenant: str | None = None) -> Schedule:
        """Let a run be due now, beside the others, also while the schedule is paused.

        Raises NotFoundError, and ConflictError if too many runs wait to begin.
        """

        def with_run(known: Schedule, now_ms: int) -> Schedule:
            if len(known.pending) >= MAX_PENDING:
                message = f"{MAX_PENDING} runs of this schedule wait to begin, which is the limit"
                raise ConflictError(message, code="too_many_runs")
            return replace(known, pending=(*known.pending, now_ms))

        return await self._change(schedule_id, tenant, with_run)

    def next_runs(self, schedule: Schedule, count: int = SHOWN_RUNS) -> tuple[int, ...]:
        """Return the next times at which a schedule is due, in Unix milliseconds; none while it is paused."""
        if not 0 <= count <= MAX_SHOWN_RUNS:
            raise RequestError(f"count must be from 0 to {MAX_SHOWN_RUNS}", param="count")
        if schedule.paused_ms or not schedule.next_ms:
            return ()
        return tuple(islice(dues(schedule.record.timing, schedule.next_ms - 1), count))

    def object_of(self, schedule: Schedule) -> dict[str, Any]:
        """Return a schedule as a JSON object with its next runs."""
        return schedule.as_object(self.next_runs(schedule))

    async def _built(self, prompt: Prompt, options: SubmitOptions) -> tuple[JobDef, str]:
        """Check a job as a submission does. Return it with the name of its model."""
        model, adapter = options.get("model"), options.get("adapter")
        task, hides = options.get("task"), options.get("hides_models", False)
        kind = GENERATE if task is None else task.kind
        record = await self._served_pool(model, adapter=adapter, kind=kind, hides_models=hides)
        with naming_pool(record.pool):
            job = await built_job(prompt, options, record, self._tenant)
            estimate_cost(job, record)
            if job.webhooks:
                await self._webhooks.check(job.webhooks, job.tenant)
        return job, model or record.model

    async def _create(
        self, action: ScheduledJob | ScheduledBatch, timing: Timing, owner: str, when: WhenOptions
    ) -> Schedule:
        fields = {name: when[name] for name in ("name", "missed", "overlap") if name in when}
        now_ms = self._now_ms()
        given = {"id": new_schedule_id(), "tenant": owner, "timing": timing, "action": action, "created_ms": now_ms}
        try:
            record = ScheduleRecord.model_validate(given | fields)
        except ValidationError as error:
            raise request_error(error) from None
        # A moment that has just come is due all the same.
        next_ms = due_after(timing, now_ms) or timing.at_ms or 0
        schedule = Schedule(record, version=1, next_ms=next_ms)
        await self.store.create(schedule, next_ms or NEVER_MS)
        return schedule

    async def _change(
        self, schedule_id: str, tenant: str | None, change: Callable[[Schedule, int], Schedule]
    ) -> Schedule:
        for _ in range(_CHANGE_TRIES):
            known, now_ms = await self.get(schedule_id, tenant=tenant), self._now_ms()
            changed = change(known, now_ms)
            if changed is known or await self.store.change(known, changed, look_ms_of(changed, now_ms)):
                return changed
        raise ConflictError(f"schedule {schedule_id} keeps changing; try again", code="schedule_busy")

    def _now_ms(self) -> int:
        return round(1000 * self._clock())


def look_ms_of(schedule: Schedule, now_ms: int) -> int:
    """Return when a gateway must look at a schedule next."""
    if schedule.pending:
        return now_ms
    return schedule.next_ms if schedule.next_ms and not schedule.paused_ms else NEVER_MS


def timing_of(when: WhenOptions, now_ms: int) -> Timing:
    """Return the timing of unchecked options. Raises RequestError that names the wrong one."""
    cron, span, at = when.get("cron"), when.get("every_s"), when.get("at")
    given = [name for name, value in (("cron", cron), ("every_s", span), ("at", at)) if value is not None]
    if len(given) != 1:
        raise RequestError("cron, every_s, at: give one of them", param=given[1] if given else "cron")
    every_s = None if span is None else seconds_of("every_s", span)
    at_ms = None
    if at is not None:
        # Refuses a datetime without a time zone.
        left_s = seconds_of("at", at) if isinstance(at, datetime) else at - now_ms / 1000
        at_ms = round(at.timestamp() * 1000) if isinstance(at, datetime) else round(1000 * at)
        if left_s > MAX_AHEAD_S:
            raise RequestError(f"at: must be within {MAX_AHEAD_S // 86_400} days", param="at")
    parts = {"cron": cron, "zone": when.get("zone", "UTC"), "every_s": every_s, "at_ms": at_ms}
    try:
        return Timing.model_validate(parts | {"start_ms": 0 if every_s is None else now_ms})
    except ValidationError as error:
        raise request_error(error, {"at_ms": "at"}) from None


def _of_schedule(options: ScheduleOptions) -> WhenOptions:
    """Take the options of a schedule out of those of its job, and return them."""
    names = WhenOptions.__annotations__
    found = {name: options.pop(name) for name in names if name in options}  # type: ignore[misc]
    return cast(WhenOptions, found)


class SyncSchedules:
    """Schedules for synchronous callers, as `Client.schedules`; see `Schedules`, whose methods it has."""

    def __init__(self, schedules: Schedules, call: Caller) -> None:
        self._schedules = schedules
        self._call = call

    def create(self, prompt: Prompt, **options: Any) -> Schedule:
        """Start a job at times that come again; see `Schedules.create`, whose options it has."""
        return self._call(self._schedules.create(prompt, **options))

    def create_batch(self, input_file_id: str, endpoint: str, **options: Any) -> Schedule:
        """Start a batch over a stored file at times that come again; see `Schedules.create_batch`."""
        return self._call(self._schedules.create_batch(input_file_id, endpoint, **options))

    def all(self, *, tenant: str | None = None) -> list[Schedule]:
        """Return all schedules, oldest first."""
        return self._call(self._schedules.all(tenant=tenant))

    def get(self, schedule_id: str, *, tenant: str | None = None) -> Schedule:
        """Return a schedule."""
        return self._call(self._schedules.get(schedule_id, tenant=tenant))

    def runs(self, schedule_id: str, *, tenant: str | None = None) -> list[ScheduleRun]:
        """Return the newest 100 runs of a schedule, the newest first."""
        return self._call(self._schedules.runs(schedule_id, tenant=tenant))

    def delete(self, schedule_id: str, *, tenant: str | None = None) -> None:
        """Delete a schedule. The jobs and batches that it started go on."""
        self._call(self._schedules.delete(schedule_id, tenant=tenant))

    def pause(self, schedule_id: str, *, tenant: str | None = None) -> Schedule:
        """Let a schedule be due no more, until it is resumed."""
        return self._call(self._schedules.pause(schedule_id, tenant=tenant))

    def resume(self, schedule_id: str, *, tenant: str | None = None) -> Schedule:
        """Let a paused schedule be due again, from now on."""
        return self._call(self._schedules.resume(schedule_id, tenant=tenant))

    def run_now(self, schedule_id: str, *, tenant: str | None = None) -> Schedule:
        """Let a run be due now, beside the others."""
        return self._call(self._schedules.run_now(schedule_id, tenant=tenant))

    def next_runs(self, schedule: Schedule, count: int = SHOWN_RUNS) -> tuple[int, ...]:
        """Return the next times at which a schedule is due, in Unix milliseconds."""
        return self._schedules.next_runs(schedule, count)
