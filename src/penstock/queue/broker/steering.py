"""Steering of jobs that were accepted: changes of one job, the steps and records of bulk actions, and pauses."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from redis.asyncio import Redis

from penstock.contract.errors import BusyError, DamagedRecordError, NotFoundError
from penstock.contract.job import pool_of
from penstock.contract.job_actions import BulkReport, JobChange, JobFilter, change_error
from penstock.contract.pauses import Pause
from penstock.contract.tenant import Terms
from penstock.queue import keys, wire
from penstock.queue.broker import scripts
from penstock.queue.broker.connection import Patience, redis_now_ms, retried, translated
from penstock.queue.broker.job_lists import MAX_TENANTS, JobLists
from penstock.queue.broker.pools import pauses_of, pool_names
from penstock.queue.record_fields import RecordFields, executed, is_text, whole
from penstock.queue.wire import Request

_LOG = logging.getLogger(__package__)
MAX_STEP_JOBS = 4
"""Jobs that one call of change.lua takes."""
LEASE_MS = 10_000
"""Milliseconds for which a process may continue a bulk action after its last step."""
_BUSY_RETRY_MS = 5_000


@dataclass(frozen=True, slots=True)
class BulkRequest:
    """A bulk action as it is stored: what to do, to which jobs, and on whose terms new jobs are submitted."""

    change: JobChange
    jobs: JobFilter
    terms: Terms

    def encoded(self) -> str:
        """Return it as JSON."""
        parts = {"change": self.change.as_object(), "jobs": self.jobs.as_object(), "tenant": self.jobs.tenant}
        return json.dumps(parts | {"terms": self.terms.model_dump()})

    @classmethod
    def decoded(cls, text: str) -> BulkRequest:
        """Return the action of this JSON."""
        parts = json.loads(text)
        jobs = JobFilter.of(parts["jobs"], tenant=parts["tenant"])
        return cls(JobChange.of(parts["change"]), jobs, Terms.model_validate(parts["terms"]))


BulkPart = Mapping[str, str]
"""The fields of an action in one pool."""


@dataclass(frozen=True, slots=True)
class HeldBulk:
    """A bulk action in one pool, whose lease this process has."""

    bulk_id: str
    pool: str
    holder: str
    request: BulkRequest
    is_dry_run: bool
    begun_ms: int
    cursor: str
    """`<tenant>/<uuid>`: all older tenants, by name, and this one's newer jobs are done."""


class Steering:
    """Changes of accepted jobs. Raises UnavailableError when Redis is unreachable."""

    def __init__(self, redis: Redis, patience: Patience | None = None) -> None:
        self.patience = patience
        self._redis = cast(Any, redis)

    @retried
    async def change(self, job_id: str, tenant: str, change: JobChange) -> None:
        """Change one job. Raises NotFoundError, ConflictError for a running or ended job, and RequestError."""
        answer = await scripts.call(self._redis, "change", pool_of(job_id), _asked(change, [job_id], tenant))
        outcome = "NOT_FOUND"
        if answer[0] == b"OK":
            outcome = answer[1][0].decode()
            scripts.log_ends(answer[2])
        if (error := change_error(job_id, outcome)) is not None:
            raise error

    @retried
    async def request(self, job_id: str) -> Request | None:
        """Return the request of an ended job, None if it is no longer kept."""
        with translated():
            data = await self._redis.get(keys.request(job_id))
        return None if data is None else wire.decode_request(data)

    # Bulk actions

    @retried
    async def pools_of(self, wanted: JobFilter) -> list[str]:
        """Return the pools of a filter's jobs."""
        if wanted.pool is not None:
            return [wanted.pool]
        with translated():
            return await pool_names(self._redis)

    @retried
    async def create(self, pool: str, bulk_id: str, tenant: str, request: BulkRequest, *, is_dry_run: bool) -> bool:
        """Store an action in a pool. Return whether there is such a pool. A repeated call changes nothing.

        Raises BusyError if the pool has too many open ones.
        """
        given = ("create", bulk_id, tenant, request.encoded(), int(is_dry_run))
        answer = await scripts.call(self._redis, "bulk", pool, *given)
        if answer[0] == b"TOO_MANY":
            message = f"pool {pool} has {answer[1]} open bulk actions, which is the limit"
            raise BusyError(message, retry_after_ms=_BUSY_RETRY_MS)
        return bool(answer[0] == b"OK")

    @retried
    async def claim(self, pool: str, bulk_id: str, holder: str) -> HeldBulk | None:
        """Get the lease of an action, or return None if another process has it, or if it has ended.

        Raises DamagedRecordError, and gives the action up then.
        """
        answer = await scripts.call(self._redis, "bulk", pool, "claim", bulk_id, holder, LEASE_MS)
        if answer[0] != b"OK":
            return None
        fields = RecordFields(f"bulk action {bulk_id}", _fields_of(answer[1]))
        try:
            return HeldBulk(
                *(bulk_id, pool, holder, fields.parsed("request", BulkRequest.decoded), fields.text("dry_run") == "1"),
                begun_ms=fields.time_ms("begun"),
                cursor=fields.text("cursor"),
            )
        except DamagedRecordError:
            await scripts.call(self._redis, "bulk", pool, "end", bulk_id)
            raise

    @retried
    async def end(self, pool: str, bulk_id: str) -> None:
        """Give an action up where it is."""
        answer = await scripts.call(self._redis, "bulk", pool, "end", bulk_id)
        if answer[0] == b"OK":
            fields = _fields_of(answer[1])
            if fields.get(b"dry_run") == b"1":
                return
            _log_end(pool, bulk_id, "cancelled", [fields.get(name.encode(), b"0") for name in _TOTALS])

    @retried
    async def step(
        self,
        held: HeldBulk,
        job_ids: Sequence[str],
        *,
        cursor: str,
        to: str,
        is_last: bool = False,
        outcomes: Sequence[str] = (),
    ) -> bool:
        """Change up to MAX_STEP_JOBS jobs, and move the action's cursor. Return whether the lease still holds.

        `outcomes`: what became of jobs that were retried. A call whose answer was lost finds the cursor moved, and
        returns False; another claim then continues.
        """
        step = {
            "bulk": held.bulk_id,
            "holder": held.holder,
            "from": cursor,
            "to": to,
            "is_last": is_last,
            "outcomes": list(outcomes),
            "lease_ms": LEASE_MS,
        }
        asked = _asked(held.request.change, job_ids, held.request.jobs.tenant or "", step)
        answer = await scripts.call(self._redis, "change", held.pool, asked)
        if answer[0] != b"OK":
            return False
        # The jobs that it ended have no line of their own.
        if answer[3] and not held.is_dry_run:
            _log_end(held.pool, held.bulk_id, "ended", answer[3], action=held.request.change.action)
        return True

    @retried
    async def open_bulks(self, pool: str) -> list[str]:
        """Return the ids of a pool's open actions, the oldest first."""
        with translated():
            return [one.decode() for one in await self._redis.zrange(keys.bulks(pool), 0, -1) if is_text(one)]

    @retried
    async def parts_of(self, bulk_id: str) -> list[BulkPart]:
        """Return what an action has done in each pool that has it. Raises DamagedRecordError."""
        with translated():
            pools = await pool_names(self._redis)
            async with self._redis.pipeline(transaction=False) as pipe:
                for pool in pools:
                    pipe.hgetall(keys.bulk(pool, bulk_id))
                found = await executed(pipe)
            now_ms = await redis_now_ms(self._redis)
        parts = [(pool, _part_of(bulk_id, fields)) for pool, fields in zip(pools, found, strict=True) if fields]
        return [part | {"left": await self._left_of(pool, part), "now": str(now_ms)} for pool, part in parts]

    async def _left_of(self, pool: str, part: BulkPart) -> str:
        """Return how many jobs an action has still to look at in a pool; empty if that takes too long to count."""
        if part["state"] != "running":
            return "0"
        jobs, lists = BulkRequest.decoded(part["request"]).jobs, JobLists(self._redis)
        tenant, _, place = part["cursor"].partition("/")
        # It covers the jobs that were accepted before it.
        jobs = replace(jobs, submitted_before=min(jobs.submitted_before or math.inf, int(part["begun"]) / 1000))
        tenants = [jobs.tenant] if jobs.tenant is not None else await lists.tenants_of(pool)
        left = [name for name in tenants if name >= tenant]
        if len(left) > MAX_TENANTS:
            return ""
        return str(await lists.num_left(jobs, pool, place if tenant in left[:1] else "", left)) if left else "0"

    # Pauses

    @retried
    async def pause(self, pool: str, names: Sequence[str], *, on: bool) -> list[Pause]:
        """Pause or resume what `pause_names` names, and return what is paused now. Raises NotFoundError, BusyError."""
        answer = await scripts.call(self._redis, "pause", pool, int(on), *names)
        if answer[0] == b"UNKNOWN_POOL":
            raise NotFoundError(f"no pool {pool[:69]}", code="model_not_found", param="pool")
        if answer[0] == b"TOO_MANY":
            raise BusyError(f"pool {pool} has too many pauses", retry_after_ms=_BUSY_RETRY_MS)
        return pauses_of(pool, _fields_of(answer[1]))

    @retried
    async def paused(self, pools: Sequence[str]) -> list[Pause]:
        """Return what is paused of these pools."""
        with translated():
            async with self._redis.pipeline(transaction=False) as pipe:
                for pool in pools:
                    pipe.hgetall(keys.paused(pool))
                found = await executed(pipe, default={})
        parts = zip(pools, found, strict=True)
        return [pause for pool, fields in parts for pause in pauses_of(pool, fields)]


def report_of(bulk_id: str, found: Sequence[BulkPart], tenant: str | None) -> BulkReport:
    """Return what an action of a tenant has done in all pools; None for one of any tenant. Raises NotFoundError."""
    parts = [part for part in found if tenant in (None, part["tenant"])]
    if not parts:
        raise NotFoundError(f"no bulk action {bulk_id[:64]}", code="bulk_not_found", param="bulk_id")
    request = BulkRequest.decoded(parts[0]["request"])
    is_dry_run = parts[0]["dry_run"] == "1"
    # What was asked to stop ends within a step. Until then the counts may change.
    states = {
        "running" if part["state"] == "ended" and int(part["asked_to_stop"]) > 0 and not is_dry_run else part["state"]
        for part in parts
    }
    failures = [line.split(" ", 1) for part in parts for line in part["failures"].splitlines()]
    return BulkReport(
        bulk_id,
        parts[0]["tenant"],
        "running" if "running" in states else "cancelled" if "cancelled" in states else "ended",
        request.change,
        request.jobs.as_object(),
        is_dry_run,
        min(int(part["begun"]) for part in parts),
        0 if "running" in states else max(int(part["ended"]) for part in parts),
        num_changed=sum(int(part["changed"]) for part in parts),
        num_asked_to_stop=sum(int(part["asked_to_stop"]) for part in parts),
        num_already_over=sum(int(part["already_over"]) for part in parts),
        num_failed=sum(int(part["failed"]) for part in parts),
        failures=tuple((job_id, code) for job_id, code in failures),
        num_left=None if any(not part["left"] for part in parts) else sum(int(part["left"]) for part in parts),
        now_ms=max(int(part["now"]) for part in parts),
    )


def _asked(change: JobChange, job_ids: Sequence[str], tenant: str, step: Mapping[str, Any] | None = None) -> bytes:
    asked = {
        "op": change.action,
        "ids": list(job_ids),
        "tenant": tenant,
        "begins_in_ms": change.begins_in_ms,
        "class": "" if change.priority is None else str(int(change.priority)),
        "background": "" if change.background is None else str(int(change.background)),
    }
    return scripts.packed(asked if step is None else asked | {"step": step})


_TOTALS = ("changed", "asked_to_stop", "already_over", "failed")
_NUMBERS = ("begun", *_TOTALS)


def _log_end(pool: str, bulk_id: str, state: str, totals: Sequence[bytes], **facts: str) -> None:
    """Write the line of an action that has ended in a pool."""
    counts = {f"num_{name}": whole(number) for name, number in zip(_TOTALS, totals, strict=True)}
    _LOG.info("a bulk action has ended", extra={"pool": pool, "bulk_id": bulk_id, "state": state, **facts, **counts})


def _part_of(bulk_id: str, found: Mapping[bytes, bytes]) -> dict[str, str]:
    """Return the fields of an action in one pool. Raises DamagedRecordError that names the field."""
    fields = RecordFields(f"bulk action {bulk_id}", found)
    fields.parsed("request", BulkRequest.decoded)
    part = {name: fields.text(name) for name in ("tenant", "request", "state", "dry_run", "failures", "cursor")}
    part |= {name: str(fields.whole(name)) for name in _NUMBERS}
    if not all(" " in line for line in part["failures"].splitlines()):
        raise fields.damaged("failures", "has a line without a code")
    return part if part["state"] == "running" else part | {"ended": str(fields.time_ms("ended"))}


def _fields_of(answer: Sequence[bytes]) -> dict[bytes, bytes]:
    return dict(zip(answer[::2], answer[1::2], strict=True))
