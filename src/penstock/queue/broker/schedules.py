"""The schedules in Redis, of all tenants. A change applies only to the state that its caller has read.

    key                      type    content
    S:schedule:<id>          hash    a schedule with its state (contract/schedule.py)
    S:tenant:<t>             zset    the tenant's schedules, by their order
    S:due                    zset    schedule → when a gateway looks at it, in ms
    S:runs:<id>              zset    its newest 100 runs, as JSON, by their number
    S:counts                 hash    counters of runs, for operators, and `number`, of what is put in order

S stands for penstock:{.schedules}; no pool can have that name. schedules.lua alone writes, for clients and gateways.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, cast

from pydantic import ValidationError
from redis.asyncio import Redis

from penstock.contract.errors import ConflictError, DamagedRecordError, InvariantError
from penstock.contract.schedule import (
    COUNTS,
    MAX_SCHEDULES,
    Count,
    Schedule,
    ScheduleRecord,
    ScheduleRun,
    ScheduleTotals,
    no_schedule,
)
from penstock.queue.broker import scripts
from penstock.queue.broker.connection import Patience, retried, translated
from penstock.queue.record_fields import executed, is_text, whole

SCHEDULES = "penstock:{.schedules}"
"""S, the prefix of all keys."""
_CONFIG = f"{SCHEDULES}:config"
NEVER_MS = -1
"""In place of a time: no gateway looks at the schedule any more."""


def schedules_of(tenant: str) -> str:
    """Zset: the tenant's schedules, by their order."""
    return f"{SCHEDULES}:tenant:{tenant}"


class ScheduleStore:
    """The schedules in Redis. Raises UnavailableError when Redis is unreachable."""

    def __init__(self, redis: Redis, patience: Patience | None = None) -> None:
        self.patience = patience
        self._redis = cast(Any, redis)

    @retried
    async def create(self, schedule: Schedule, look_ms: int) -> None:
        """Store a new schedule. Raises ConflictError if the tenant has too many. A repeated call changes nothing."""
        record = schedule.record
        given = (record.id, record.tenant, record.model_dump_json(), _fields_of(schedule), look_ms, MAX_SCHEDULES)
        if await self._call("put", *given) == b"TOO_MANY":
            message = f"this tenant has {MAX_SCHEDULES} schedules, the limit; delete one that is not used"
            raise ConflictError(message, code="too_many_schedules")

    @retried
    async def of(self, tenant: str) -> list[Schedule]:
        """Return a tenant's schedules, oldest first. A damaged one is left out."""
        with translated():
            ids = await self._redis.zrange(schedules_of(tenant), 0, -1)
            async with self._redis.pipeline(transaction=False) as pipe:
                for one in ids:
                    pipe.hgetall(f"{SCHEDULES}:schedule:{one.decode(errors='replace')}")
                found = await executed(pipe, default={}) if ids else []
        return [one for one in map(_decoded, found) if one is not None]

    @retried
    async def get(self, schedule_id: str, tenant: str) -> Schedule:
        """Return a schedule of a tenant. Raises NotFoundError, and DamagedRecordError."""
        with translated():
            found = await self._redis.hgetall(f"{SCHEDULES}:schedule:{schedule_id}")
        if not found or found.get(b"tenant") != tenant.encode():
            raise no_schedule(schedule_id)
        if (schedule := _decoded(found)) is None:
            raise DamagedRecordError(f"the record of schedule {schedule_id} is damaged; delete it")
        return schedule

    @retried
    async def runs(self, schedule_id: str, tenant: str) -> list[ScheduleRun]:
        """Return the newest runs of a schedule, the newest first. Raises NotFoundError."""
        await self.get(schedule_id, tenant)
        with translated():
            found = await self._redis.zrevrange(f"{SCHEDULES}:runs:{schedule_id}", 0, -1)
        return [one for one in map(_run_of, found) if one is not None]

    @retried
    async def delete(self, schedule_id: str, tenant: str) -> None:
        """Delete a schedule. What it started goes on. Raises NotFoundError."""
        if await self._call("remove", schedule_id, tenant) != b"OK":
            raise no_schedule(schedule_id)

    @retried
    async def take(self, now_ms: int, lease_ms: int, most: int) -> list[Schedule]:
        """Return schedules to look at now. No other call gets them before the lease has ended.

        A damaged one is put off.
        """
        found = await self._call("take", now_ms, lease_ms, most)
        read = (_decoded(dict(zip(fields[1::2], fields[2::2], strict=True))) for fields in found)
        return [one for one in read if one is not None]

    @retried
    async def change(
        self,
        known: Schedule,
        changed: Schedule,
        look_ms: int,
        runs: Sequence[ScheduleRun] = (),
        counts: Mapping[Count, int] | None = None,
    ) -> bool:
        """Store a changed state, with runs and counts that came about. Return false if `known` is no longer the state.

        `look_ms`: when a gateway looks at the schedule next. A call whose answer was lost returns false, too.
        """
        texts = [json.dumps(asdict(run)) for run in runs]
        answer = await self._call(
            "change", known.id, known.version, _fields_of(changed), look_ms, texts, dict(counts or {})
        )
        if answer not in (b"OK", b"STALE", b"GONE"):
            raise InvariantError(f"schedules.lua answered {answer!r}")
        return bool(answer == b"OK")

    @retried
    async def totals(self) -> ScheduleTotals:
        """Return what operators see of all schedules."""
        with translated():
            counts = await self._redis.hgetall(f"{SCHEDULES}:counts")
            first = await self._redis.zrange(f"{SCHEDULES}:due", 0, 0, withscores=True)
        by_name = {name: whole(counts.get(name.encode())) for name in COUNTS}
        return ScheduleTotals(by_name, int(first[0][1]) if first else None)

    async def _call(self, operation: str, *arguments: Any) -> Any:
        return await scripts.call_at(self._redis, "schedules", _CONFIG, operation, scripts.packed(arguments))


def _fields_of(schedule: Schedule) -> dict[str, Any]:
    return {
        "next": schedule.next_ms,
        "pending": " ".join(map(str, schedule.pending)),
        "paused": schedule.paused_ms,
        "last": schedule.last_id,
        "last_due": schedule.last_due_ms,
        "problem": schedule.problem,
    }


def _decoded(fields: Mapping[bytes, bytes]) -> Schedule | None:
    """Return a schedule, None for a damaged one. A damaged number counts as 0."""
    try:
        record = ScheduleRecord.model_validate_json(fields.get(b"record", b""))
    except ValidationError:
        return None
    texts = {name: value.decode() if is_text(value) else "" for name, value in fields.items()}
    pending = tuple(number for text in texts.get(b"pending", "").split() if (number := whole(text)))
    return Schedule(
        record,
        whole(fields.get(b"version")),
        next_ms=whole(fields.get(b"next")),
        pending=pending,
        paused_ms=whole(fields.get(b"paused")),
        last_id=texts.get(b"last", ""),
        last_due_ms=whole(fields.get(b"last_due")),
        problem=texts.get(b"problem", ""),
        num_started=whole(fields.get(b"started")),
        num_missed=whole(fields.get(b"missed")),
        num_skipped=whole(fields.get(b"skipped")),
        num_failed=whole(fields.get(b"failed")),
    )


def _run_of(data: bytes) -> ScheduleRun | None:
    try:
        return ScheduleRun(**json.loads(data))
    except (ValueError, TypeError):
        return None
