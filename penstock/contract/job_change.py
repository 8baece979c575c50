"""What may be done to jobs beside running them: changes of one job or of many, their reports, and pauses."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self, cast, get_args

from penstock.contract.errors import ConflictError, NotFoundError, PenstockError, RequestError
from penstock.contract.job import MAX_DEADLINE_S
from penstock.contract.job_filter import checked_class
from penstock.contract.priority import NUM_LEVELS, Priority, class_of_level, is_background

ActionName = Literal["cancel", "retry", "reschedule", "change_class"]
ACTIONS: tuple[ActionName, ...] = get_args(ActionName)
STATES_OF: Mapping[ActionName, tuple[str, ...]] = {
    "cancel": ("scheduled", "queued", "running", "cancelling"),
    "retry": ("failed", "cancelled", "expired", "dead"),
    "reschedule": ("scheduled", "queued"),
    "change_class": ("scheduled", "queued"),
}
"""The states of the jobs that an action can change; a bulk action whose filter names no state covers these."""


@dataclass(frozen=True, slots=True)
class JobChange:
    """An action and its arguments. Raises RequestError that names the wrong one."""

    action: ActionName
    not_before_s: float | None = None
    """For `reschedule`: seconds from now on that the job waits; 0 queues it now."""
    priority: Priority | None = None
    """For `change_class`: the new class; None keeps it."""
    background: bool | None = None
    """For `change_class`: whether the job becomes background work; None keeps it."""

    def __post_init__(self) -> None:
        given = {name for name in ("not_before_s", "priority", "background") if getattr(self, name) is not None}
        if self.action not in ACTIONS:
            raise RequestError(f"action: must be one of {', '.join(ACTIONS)}", param="action")
        allowed = {"reschedule": {"not_before_s"}, "change_class": {"priority", "background"}}.get(self.action, set())
        if wrong := sorted(given - allowed):
            raise RequestError(f"{wrong[0]}: not allowed with the action {self.action}", param=wrong[0])
        if allowed and not given:
            name = "not_before_s" if self.action == "reschedule" else "priority"
            raise RequestError(f"{name}: is required for the action {self.action}", param=name)
        seconds: Any = self.not_before_s
        if seconds is not None and (
            isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= MAX_DEADLINE_S
        ):
            message = f"not_before_s: must be from 0 to {MAX_DEADLINE_S} seconds"
            raise RequestError(message, param="not_before_s")
        if self.background not in (None, True, False):
            raise RequestError("background: must be true or false", param="background")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Return the change of unchecked parts. Without `action`, they must be those of one action."""
        parts = {name: given.get(name) for name in ("not_before_s", "background")}
        action = given.get("action") or ("change_class" if parts["not_before_s"] is None else "reschedule")
        return cls(cast(ActionName, action), priority=checked_class(given.get("priority")), **cast(Any, parts))

    def as_object(self) -> dict[str, Any]:
        """Return the parts that are given, as plain values that `of` takes."""
        label = None if self.priority is None else self.priority.label
        parts = {"not_before_s": self.not_before_s, "priority": label, "background": self.background}
        return {"action": self.action} | {name: value for name, value in parts.items() if value is not None}

    @property
    def begins_in_ms(self) -> int:
        """Milliseconds that a rescheduled job waits."""
        return math.ceil(1000 * (self.not_before_s or 0))


def change_error(job_id: str, outcome: str) -> PenstockError | None:
    """Return the error for a job that could not be changed, None for one that was."""
    match outcome:
        case "changed":
            return None
        case "NOT_FOUND":
            return NotFoundError(f"no job {job_id}", code="job_not_found", param="job_id")
        case "over":
            return ConflictError(f"job {job_id} has ended", code="job_ended", param="job_id")
        case "job_running":
            return ConflictError(f"a node runs job {job_id} already", code="job_running", param="job_id")
        case "after_deadline":
            return RequestError("not_before_s: the job's deadline comes before", param="not_before_s")
        case "job_open":
            return ConflictError(f"job {job_id} has not ended", code="job_open", param="job_id")
        case "job_succeeded":
            return ConflictError(f"job {job_id} succeeded; its request is gone", code="job_ended", param="job_id")
    return NotFoundError(f"the request of job {job_id} is no longer kept", code="request_expired", param="job_id")


@dataclass(frozen=True, slots=True)
class BulkReport:
    """What a bulk action has done so far, over all pools. It changes until `state` is `ended` or `cancelled`."""

    bulk_id: str
    tenant: str
    """Whose action it is."""
    state: Literal["running", "ended", "cancelled"]
    change: JobChange
    jobs: Mapping[str, Any]
    """The filter, as plain values."""
    is_dry_run: bool
    begun_ms: int
    """Redis ms. The action covers the jobs that were accepted until then."""
    ended_ms: int = 0
    num_changed: int = 0
    """In a dry run: the jobs that would be changed."""
    num_already_over: int = 0
    """Jobs that had ended, or for a retry: that succeeded or were retried before."""
    num_failed: int = 0
    failures: tuple[tuple[str, str], ...] = ()
    """(job id, error code) of the first failures, at most 20 per pool."""

    def as_object(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        return {
            "id": self.bulk_id,
            "object": "bulk_action",
            "state": self.state,
            **self.change.as_object(),
            "filter": dict(self.jobs),
            "dry_run": self.is_dry_run,
            "begun_ms": self.begun_ms,
            "ended_ms": self.ended_ms or None,
            "changed": self.num_changed,
            "already_over": self.num_already_over,
            "failed": self.num_failed,
            "failures": [{"id": job_id, "code": code} for job_id, code in self.failures],
        }


def retry_id(job_id: str, bulk_id: str, begun_ms: int) -> str:
    """Return the id of the job by which a bulk action retries a job. A repeated step so finds its own job."""
    pool = job_id.partition(".")[0]
    drawn = hashlib.blake2b(f"{bulk_id}\0{job_id}".encode(), digest_size=10).hexdigest()
    made = f"{begun_ms:012x}"
    variant = "89ab"[int(drawn[3], 16) % 4]
    return f"{pool}.{made[:8]}-{made[8:]}-7{drawn[:3]}-{variant}{drawn[4:7]}-{drawn[8:20]}"


@dataclass(frozen=True, slots=True)
class Pause:
    """What is paused of a pool: one tenant, one level, or with neither the whole pool. Nodes take no such job."""

    pool: str
    since_ms: int
    tenant: str | None = None
    level: int | None = None

    def as_object(self) -> dict[str, Any]:
        """Return the pause as a JSON object."""
        of_level = {}
        if self.level is not None:
            of_level = {"priority": class_of_level(self.level).label, "background": is_background(self.level)}
        of_tenant = {} if self.tenant is None else {"tenant": self.tenant}
        return {"pool": self.pool, **of_tenant, **of_level, "since_ms": self.since_ms}


def pause_names(tenant: str | None, priority: Priority | None, background: bool | None) -> list[str]:
    """Return the fields of P:paused for a tenant, for the levels of a class, or for the pool.

    Raises RequestError for a tenant together with a class.
    """
    if tenant is not None:
        if priority is not None or background is not None:
            raise RequestError("tenant: not allowed together with priority or background", param="tenant")
        return [f"tenant:{tenant}"]
    if priority is None and background is None:
        return ["pool"]
    levels = [n for n in range(NUM_LEVELS) if priority in (None, class_of_level(n))]
    return [f"level:{n}" for n in levels if background in (None, is_background(n))]
