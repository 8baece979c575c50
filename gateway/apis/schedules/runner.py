"""The loop in which a gateway starts the runs of schedules that are due, beside the other gateways."""

from __future__ import annotations

import asyncio
import base64
import logging
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from penstock.contract.errors import (
    BusyError,
    ConflictError,
    ForbiddenError,
    NotFoundError,
    PenstockError,
    RequestError,
    UnavailableError,
)
from penstock.contract.job import SubmitOptions, is_job_id
from penstock.contract.output import TERMINAL_STATES
from penstock.contract.priority import Priority, class_not_allowed
from penstock.contract.schedule import Count, Schedule, ScheduledBatch, ScheduledJob, ScheduleRun, tag_of
from penstock.contract.tenant import ApiKey
from penstock.producer.client import AsyncClient
from penstock.producer.client.control import request_options
from penstock.producer.client.schedule_times import decided
from penstock.producer.client.schedules import look_ms_of
from penstock.queue import wire
from penstock.queue.files.batch import BatchSpec, new_batch_id, window_s
from penstock.queue.wire import WireError

logger = logging.getLogger("penstock.gateway")

LOOK_S = 1.0
"""Seconds between two looks for schedules that are due."""
LEASE_MS = 30_000
"""Milliseconds for which no other gateway gets a schedule that this one looks at."""
MAX_TAKEN = 64
"""Schedules that one look takes."""
MAX_AT_ONCE = 16
"""Schedules whose runs a gateway starts at the same time."""
WAIT_MS = 2_000
"""Milliseconds until a run that waits for the end of the one before is looked at again."""
MAX_REASON_CHARS = 200


class ScheduleRunner:
    """Starts what is due. Several runners of one Redis start each run once."""

    def __init__(
        self, client: AsyncClient, max_open_batches: int, clock: Callable[[], float], lease_ms: int = LEASE_MS
    ) -> None:
        """`clock` returns Unix seconds. `max_open_batches`: those that a tenant may have."""
        self._client = client
        self._store = client.schedules.store
        self._max_open_batches = max_open_batches
        self._clock = clock
        self._lease_ms = lease_ms
        self._at_once = asyncio.Semaphore(MAX_AT_ONCE)

    async def run(self) -> None:
        """Start what is due until canceled. What this interrupts, another gateway does once the lease has ended."""
        while True:
            num_taken = 0
            try:
                num_taken = await self.look()
            except UnavailableError:
                pass
            except PenstockError as error:
                logger.error("schedules cannot be run now", extra={"reason": error.reason})
            except Exception:
                # A defect, or records that nothing of ours has written. The next look goes on with the others.
                logger.exception("a look for schedules failed")
            if num_taken < MAX_TAKEN:
                await asyncio.sleep(LOOK_S * random.uniform(0.75, 1.25))

    async def look(self) -> int:
        """Take what is due, and start its runs. Return the number of schedules that were taken."""
        taken = await self._store.take(self._now_ms(), self._lease_ms, MAX_TAKEN)
        async with asyncio.TaskGroup() as group:
            for one in taken:
                group.create_task(self._bounded(one), name=f"penstock {one.id}")
        return len(taken)

    async def _bounded(self, schedule: Schedule) -> None:
        async with self._at_once:
            try:
                await self._go_on(schedule)
            except UnavailableError:
                pass  # The lease ends, and a gateway takes it again.
            except Exception:
                logger.exception("a schedule could not be looked at", extra={"schedule_id": schedule.id})

    async def _go_on(self, schedule: Schedule) -> None:
        """Decide about the times that have come, and start the runs that are due, one after another."""
        now_ms = self._now_ms()
        decision = decided(schedule, now_ms)
        known: Schedule | None = schedule
        if decision.schedule != schedule:
            counts: dict[Count, int] = {"missed": decision.num_missed} if decision.num_missed else {}
            if decision.num_missed:
                facts = {"schedule_id": schedule.id, "tenant": schedule.tenant, "num_runs": decision.num_missed}
                logger.warning("runs of a schedule were missed", extra=facts)
            look_ms = now_ms if not decision.is_whole else self._look_ms(decision.schedule)
            known = await self._changed(schedule, decision.schedule, look_ms, counts=counts)
        while known is not None and known.pending:
            known = await self._begin_first(known)
        # A schedule with nothing to do was taken for a state that has gone, such as a run that another gateway began.
        if known is schedule:
            await self._changed(schedule, schedule, look_ms_of(schedule, now_ms))

    async def _begin_first(self, known: Schedule) -> Schedule | None:
        """Begin the oldest run that is due. Return the state then; None if this gateway does nothing more now."""
        due_ms = known.pending[0]
        if known.last_id and known.last_due_ms != due_ms and not await self._has_ended(known):
            match known.record.overlap:
                case "wait":
                    waiting = replace(known, problem="the run before has not ended")
                    await self._changed(known, waiting, self._now_ms() + WAIT_MS)
                    return None
                case "skip":
                    run = ScheduleRun(due_ms, "skipped", self._now_ms(), reason="the run before had not ended")
                    return await self._popped(known, run, "skipped")
                case "cancel":
                    await self._cancel_last(known)
        try:
            object_id = await self._started(known, due_ms)
        except (BusyError, UnavailableError) as error:
            waiting = replace(known, problem=f"{error.code}: {error.message[:MAX_REASON_CHARS]}")
            await self._changed(known, waiting, self._now_ms() + max(1_000, error.retry_after_ms))
            return None
        except PenstockError as error:
            facts = {"schedule_id": known.id, "tenant": known.tenant, "reason": error.reason}
            logger.warning("a run of a schedule could not start", extra=facts)
            reason = f"{error.code}: {error.message[:MAX_REASON_CHARS]}"
            return await self._popped(known, ScheduleRun(due_ms, "failed", self._now_ms(), reason=reason), "failed")
        run = ScheduleRun(due_ms, "started", self._now_ms(), object_id)
        begun = replace(known, last_id=object_id, last_due_ms=due_ms)
        return await self._popped(begun, run, "started")

    async def _popped(self, known: Schedule, run: ScheduleRun, count: Count) -> Schedule | None:
        """Store that the oldest run that was due has begun, or never will."""
        left = replace(known, pending=known.pending[1:], problem="")
        return await self._changed(known, left, self._look_ms(left), [run], {count: 1})

    async def _changed(
        self,
        known: Schedule,
        changed: Schedule,
        look_ms: int,
        runs: list[ScheduleRun] | None = None,
        counts: dict[Count, int] | None = None,
    ) -> Schedule | None:
        """Store a change. Return the new state, or None if another gateway or the owner has changed it meanwhile."""
        if not await self._store.change(known, changed, look_ms, runs or (), counts):
            return None
        return replace(changed, version=known.version + 1)

    def _look_ms(self, schedule: Schedule) -> int:
        """Return when another gateway may look at a schedule: after the lease while this one begins its runs."""
        now_ms = self._now_ms()
        return now_ms + self._lease_ms if schedule.pending else look_ms_of(schedule, now_ms)

    async def _has_ended(self, schedule: Schedule) -> bool:
        """Return whether the last run has ended. What Redis no longer knows has."""
        with suppress(NotFoundError):
            if is_job_id(schedule.last_id):
                status = await self._client.status(schedule.last_id, tenant=schedule.tenant)
                return status.state in TERMINAL_STATES
            return not (await self._client.batches.find(schedule.last_id, schedule.tenant)).is_open
        return True

    async def _cancel_last(self, schedule: Schedule) -> None:
        with suppress(NotFoundError, ConflictError):
            if is_job_id(schedule.last_id):
                await self._client.cancel(schedule.last_id, tenant=schedule.tenant)
            else:
                await self._client.batches.cancel(schedule.last_id, schedule.tenant)

    async def _started(self, schedule: Schedule, due_ms: int) -> str:
        """Start a run, and return the id of its job or batch. A repeated call returns the same one."""
        action, key = schedule.record.action, f"{schedule.id}:{due_ms}"
        caller = await self._caller(action.key_id)
        if isinstance(action, ScheduledBatch):
            window = action.completion_window
            spec = BatchSpec(
                action.input_file_id,
                action.endpoint,
                window,
                action.metadata,
                None,
                "" if caller is None else caller.key_id,
                max_attempts=action.max_attempts,
                retry_backoff_s=action.retry_backoff_s,
            )
            return await self._client.batches.create(
                new_batch_id(),
                schedule.tenant,
                spec,
                window_ms=1000 * window_s(window),
                max_open=self._max_open_batches,
                key=key,
                terms=caller,
            )
        prompt, options = self._job_of(action, caller)
        options |= {
            "tenant": schedule.tenant,
            "tags": (*action.tags, tag_of(schedule.id)),
            "idempotency_key": key,
            "queue_without_node": True,
        }
        return (await self._client.submit_unread(prompt, **options)).job_id

    def _job_of(self, action: ScheduledJob, caller: ApiKey | None) -> tuple[Any, SubmitOptions]:
        try:
            request = wire.decode_request(base64.b64decode(action.request, validate=True))
        except (WireError, ValueError):
            raise RequestError("the request of the schedule is damaged; delete it", code="damaged_record") from None
        prompt, options = request_options(request)
        priority, model = Priority(action.priority), action.model
        if caller is not None:
            highest = Priority.of(caller.highest_class)
            if priority < highest:
                raise class_not_allowed(priority, highest, "the API key of the schedule")
            model = caller.model_of(model)
        options |= {
            "model": model,
            "priority": priority,
            "background": action.background,
            "metadata": action.metadata,
            "custom_id": action.custom_id,
            "webhooks": action.webhooks,
            "deadline_s": action.deadline_s,
            "ttl_s": action.ttl_s,
            "terms": action.terms if caller is None else caller.metered_terms,
            "hides_models": caller is not None and bool(caller.models),
        }
        return prompt, options

    async def _caller(self, key_id: str) -> ApiKey | None:
        """Return the API key of a schedule; None without one. Raises ForbiddenError for a revoked one."""
        if not key_id:
            return None
        key = await self._client.batches.key(key_id)
        if key is None or key.is_revoked:
            raise ForbiddenError(f"the API key {key_id} of the schedule is revoked", code="key_revoked")
        return key

    def _now_ms(self) -> int:
        return round(1000 * self._clock())
