"""Schedules: when jobs or batches start by themselves, and what becomes of runs that are missed or overlap."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, NamedTuple, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from penstock.contract.errors import NotFoundError
from penstock.contract.fields import NAME_PATTERN
from penstock.contract.retries import MAX_ATTEMPTS, MAX_RETRY_BACKOFF_S
from penstock.contract.tenant import UNLIMITED, Terms

MAX_SCHEDULES = 1_000
"""Schedules of one tenant."""
MAX_NAME_CHARS = 128
MAX_CRON_CHARS = 128
MAX_ZONE_CHARS = 64
MAX_EVERY_S = 366 * 86_400
MIN_EVERY_S = 1
MAX_AHEAD_S = 366 * 86_400
"""Seconds until the moment of a schedule that runs once, at most."""
MAX_REQUEST_BYTES = 256 << 10
"""Bytes of the request of a schedule's job. They stay in Redis for as long as the schedule."""
MAX_TAGS_OF_SCHEDULE = 3
"""Tags that a schedule gives to its jobs. The last one that a job may have names the schedule."""
_ID_PATTERN = r"^sched_[0-9a-f]{24}$"

MissedRule = Literal["skip", "one", "all"]
"""What becomes of runs whose time passed while no gateway ran: none starts, only the newest one, or each."""
OverlapRule = Literal["skip", "wait", "cancel"]
"""What happens when a run is due before the one before has ended: it is left out, it waits, or the one before is
canceled."""
RunState = Literal["started", "skipped", "failed"]
Count = Literal["started", "missed", "skipped", "failed"]
COUNTS: tuple[Count, ...] = get_args(Count)


def new_schedule_id() -> str:
    """Return a random id."""
    return f"sched_{secrets.token_hex(12)}"


def tag_of(schedule_id: str) -> str:
    """Return the tag of the jobs that a schedule starts."""
    return f"schedule:{schedule_id}"


def no_schedule(schedule_id: str) -> NotFoundError:
    """Return the error for a schedule that is unknown, deleted, or of another tenant."""
    return NotFoundError(f"no schedule {schedule_id[:64]!r}", code="schedule_not_found", param="schedule_id")


class Timing(BaseModel):
    """When a schedule is due: by a cron line in a time zone, at intervals, or once. Times are Unix milliseconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cron: Annotated[str, StringConstraints(min_length=1, max_length=MAX_CRON_CHARS)] | None = None
    zone: Annotated[str, StringConstraints(min_length=1, max_length=MAX_ZONE_CHARS)] = "UTC"
    every_s: Annotated[float, Field(ge=MIN_EVERY_S, le=MAX_EVERY_S, allow_inf_nan=False)] | None = None
    start_ms: Annotated[int, Field(ge=0, lt=2**53)] = 0
    """The moment from which intervals count."""
    at_ms: Annotated[int, Field(ge=0, lt=2**53)] | None = None

    @model_validator(mode="after")
    def _has_one_form(self) -> Self:
        if sum(one is not None for one in (self.cron, self.every_s, self.at_ms)) != 1:
            raise PydanticCustomError("timing", "give one of cron, every_s and at")
        return self


class ScheduledJob(BaseModel):
    """The job that a schedule starts. `request` is the encoded request of a job, in base64."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    kind: Literal["job"] = "job"
    model: str
    request: str = Field(repr=False)
    priority: int
    background: bool = True
    tags: tuple[str, ...] = ()
    metadata: dict[str, str] | None = None
    custom_id: str | None = None
    webhooks: tuple[str, ...] | None = None
    deadline_s: float | None = None
    ttl_s: float | None = None
    in_feed: bool = True
    words: str = ""
    """The first words of the prompt."""
    terms: Terms = UNLIMITED
    key_id: str = ""
    """The API key on whose terms its jobs run; empty without one: then `terms` are."""


class ScheduledBatch(BaseModel):
    """The batch that a schedule starts, over a stored file."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    kind: Literal["batch"] = "batch"
    input_file_id: Annotated[str, StringConstraints(min_length=1, max_length=128)]
    endpoint: Annotated[str, StringConstraints(min_length=1, max_length=128)]
    completion_window: Annotated[str, StringConstraints(max_length=16)] = "24h"
    metadata: dict[str, str] | None = None
    max_attempts: Annotated[int, Field(ge=1, le=MAX_ATTEMPTS)] | None = None
    retry_backoff_s: Annotated[float, Field(ge=0, le=MAX_RETRY_BACKOFF_S)] | None = None
    key_id: str = ""


class ScheduleRecord(BaseModel):
    """What a tenant asked for. It does not change."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    id: Annotated[str, StringConstraints(pattern=_ID_PATTERN)]
    tenant: Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
    name: Annotated[str, StringConstraints(max_length=MAX_NAME_CHARS)] = ""
    timing: Timing
    missed: MissedRule = "one"
    overlap: OverlapRule = "skip"
    action: Annotated[ScheduledJob | ScheduledBatch, Field(discriminator="kind")]
    created_ms: int


@dataclass(frozen=True, slots=True)
class ScheduleRun:
    """One run of a schedule. Times are Unix milliseconds."""

    due_ms: int
    state: RunState
    at_ms: int
    """When it started, or was given up."""
    object_id: str = ""
    """The job or batch that it started."""
    reason: str = ""
    """Why it did not start."""

    def as_object(self) -> dict[str, Any]:
        """Return the run as a JSON object."""
        named = {"id": self.object_id} if self.object_id else {}
        why = {"reason": self.reason} if self.reason else {}
        return {"due": iso(self.due_ms), "state": self.state, "at": iso(self.at_ms), **named, **why}


@dataclass(frozen=True, slots=True)
class Schedule:
    """A schedule with its present state. Times are Unix milliseconds, 0 for none."""

    record: ScheduleRecord
    version: int
    """It grows with each change of the state."""
    next_ms: int = 0
    """The next time that is due, as far as nothing was decided about it; 0: none is to come."""
    pending: tuple[int, ...] = ()
    """The runs that are due and have not begun, oldest first, by the time at which they were due."""
    paused_ms: int = 0
    last_id: str = ""
    """The job or batch of the last run."""
    last_due_ms: int = 0
    problem: str = ""
    """Why a run that is due has not begun; empty once one has."""
    num_started: int = 0
    num_missed: int = 0
    num_skipped: int = 0
    num_failed: int = 0

    @property
    def id(self) -> str:
        """The schedule's id."""
        return self.record.id

    @property
    def tenant(self) -> str:
        """Whose schedule it is."""
        return self.record.tenant

    def as_object(self, next_runs: tuple[int, ...] = ()) -> dict[str, Any]:
        """Return the schedule as a JSON object. `next_runs`: the next times at which it is due."""
        record, timing = self.record, self.record.timing
        when: dict[str, Any]
        if timing.cron is not None:
            when = {"cron": timing.cron, "zone": timing.zone}
        elif timing.every_s is not None:
            when = {"every_s": timing.every_s}
        else:
            when = {"at": iso(timing.at_ms or 0)}
        hidden = {"request", "terms", "key_id", "kind"}
        return {
            "id": record.id,
            "object": "schedule",
            "name": record.name or None,
            **when,
            "missed": record.missed,
            "overlap": record.overlap,
            record.action.kind: record.action.model_dump(exclude=hidden, exclude_none=True),
            "created_at": iso(record.created_ms),
            "paused_since": iso(self.paused_ms) if self.paused_ms else None,
            "next_runs": [iso(at_ms) for at_ms in next_runs],
            "waiting_runs": [iso(at_ms) for at_ms in self.pending],
            "last_run": {"due": iso(self.last_due_ms), "id": self.last_id} if self.last_id else None,
            "problem": self.problem or None,
            "started": self.num_started,
            "missed_runs": self.num_missed,
            "skipped_runs": self.num_skipped,
            "failed_runs": self.num_failed,
        }


class ScheduleTotals(NamedTuple):
    """How many runs of all schedules started, were missed, skipped and failed, and when a gateway looks next."""

    counts: Mapping[Count, int]
    first_look_ms: int | None
    """None: there is nothing to look at."""


def iso(at_ms: int) -> str:
    """Return a time as text in UTC, such as `2026-01-31T03:00:00Z`."""
    seconds, ms = divmod(at_ms, 1000)
    text = datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    return f"{text}.{ms:03}Z" if ms else f"{text}Z"
