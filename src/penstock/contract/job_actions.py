"""Which jobs a list or a bulk action names, and what it may do to them: changes and their reports."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self, TypedDict, cast, get_args

from penstock.contract.durations import span_of
from penstock.contract.errors import ConflictError, NotFoundError, PenstockError, RequestError
from penstock.contract.fields import NAME_PATTERN
from penstock.contract.job import (
    MAX_CUSTOM_ID_CHARS,
    MAX_DEADLINE_S,
    MAX_METADATA,
    MAX_METADATA_KEY_CHARS,
    MAX_METADATA_VALUE_CHARS,
    MAX_TAG_CHARS,
    TAG_PATTERN,
)
from penstock.contract.output import STATES
from penstock.contract.priority import NUM_LEVELS, NUM_PRIORITIES, ClassName, Priority, class_of_level, is_background

MAX_POOL_CHARS = 69
MAX_UNIX_S = 2**47 / 1000
"""A later time does not fit into the id of a job."""
LISTED_STATES = tuple(state for state in STATES if state != "cancelling")
"""The states with a list of their own. A job that is being cancelled is in that of running jobs."""
_CURSOR_PATTERN = r"([0-9a-f]{8}-[0-9a-f-]{4,27})\.([0-9a-f]{8})"


def checked_states(given: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the states of a filter; a text separates them by commas. Raises RequestError for an unknown one."""
    names = given.split(",") if isinstance(given, str) else tuple(given or ())
    states = tuple(dict.fromkeys(names))
    wrong = [state for state in states if state not in STATES]
    if wrong:
        raise RequestError(f"state: {wrong[0][:32]!r} is not one of {', '.join(STATES)}", param="state")
    if given is not None and not states:
        raise RequestError(f"state: must name one of {', '.join(STATES)}", param="state")
    return states


def checked_class(name: str | int | None) -> Priority | None:
    """Return the class of this name or number. Raises RequestError for an unknown one."""
    if name is None or isinstance(name, Priority):
        return name
    if isinstance(name, int) and not isinstance(name, bool) and 0 <= name < NUM_PRIORITIES:
        return Priority(name)
    if name not in get_args(ClassName):
        names = ", ".join(f"{one.label} ({one.value})" for one in Priority)
        message = f"priority: must be one of {names}, not {str(name)[:32]!r}"
        raise RequestError(message, param="priority")
    return Priority.of(cast(ClassName, name))


def checked_tag(tag: str | None) -> str | None:
    """Return a tag. Raises RequestError if no job can have it."""
    if tag is not None and not (isinstance(tag, str) and len(tag) <= MAX_TAG_CHARS and re.fullmatch(TAG_PATTERN, tag)):
        allowed = "letters, digits and . : = / @ + - _, with a letter or a digit first"
        raise RequestError(f"tag: must have 1 to {MAX_TAG_CHARS} characters: {allowed}", param="tag")
    return tag


def checked_custom_id(custom_id: Any) -> str | None:
    """Return a custom_id. Raises RequestError if no job can have it."""
    if custom_id is not None and not (isinstance(custom_id, str) and 0 < len(custom_id) <= MAX_CUSTOM_ID_CHARS):
        raise RequestError(f"custom_id: must have 1 to {MAX_CUSTOM_ID_CHARS} characters", param="custom_id")
    return custom_id


def checked_metadata(metadata: Any) -> dict[str, str]:
    """Return the members that jobs must have, by name. Raises RequestError for other ones than jobs have."""
    given = {} if metadata is None else metadata
    if not isinstance(given, Mapping) or len(given) > MAX_METADATA:
        raise RequestError(f"metadata: must be up to {MAX_METADATA} texts by name", param="metadata")
    for name, value in given.items():
        if not (isinstance(name, str) and 0 < len(name) <= MAX_METADATA_KEY_CHARS and isinstance(value, str)):
            message = f"metadata: a name has 1 to {MAX_METADATA_KEY_CHARS} characters, and its value is a text"
            raise RequestError(message, param="metadata")
        if len(value) > MAX_METADATA_VALUE_CHARS:
            message = f"metadata: a value has at most {MAX_METADATA_VALUE_CHARS} characters"
            raise RequestError(message, param="metadata")
    return dict(given)


def checked_time(unix_s: Any, name: str) -> float | None:
    """Return a time in Unix seconds. Raises RequestError that names `name`."""
    if unix_s is None:
        return None
    try:
        given_s = float(unix_s)
    except (TypeError, ValueError):
        given_s = math.nan
    if isinstance(unix_s, bool) or not 0 <= given_s <= MAX_UNIX_S:
        raise RequestError(f"{name}: must be a time in Unix seconds, from 0 to {MAX_UNIX_S:.0f}", param=name)
    return given_s


class FilterOptions(TypedDict, total=False):
    """The parts of a filter as keyword arguments. A part that is None counts as absent.

    state: one state, or several.
    submitted_after, submitted_before: Unix seconds, compared with the times in the jobs' ids.
    custom_id: the caller's name of a job. Jobs of several batches may share it.
    metadata: texts that the jobs' metadata has, by name; only beside tag, custom_id or submitted_after.
    """

    pool: str | None
    state: str | Sequence[str] | None
    priority: Priority | ClassName | None
    background: bool | None
    tag: str | None
    submitted_after: float | None
    submitted_before: float | None
    custom_id: str | None
    metadata: Mapping[str, str] | None


FILTERS = tuple(FilterOptions.__annotations__)


@dataclass(frozen=True, slots=True)
class JobFilter:
    """The jobs to which all given parts apply. Raises RequestError for a wrong part.

    The times are those in the jobs' ids, which their clients made at submission, in Unix seconds.
    """

    tenant: str | None = None
    """None: of all tenants."""
    pool: str | None = None
    states: tuple[str, ...] = ()
    priority: Priority | None = None
    background: bool | None = None
    tag: str | None = None
    submitted_after: float | None = None
    """Only jobs from this time on."""
    submitted_before: float | None = None
    """Only jobs before this time."""
    custom_id: str | None = None
    # Of one request.
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Only jobs whose metadata has these members."""

    def __post_init__(self) -> None:
        if self.metadata and self.tag is None and self.custom_id is None and self.submitted_after is None:
            message = "metadata: a filter by metadata also needs tag, custom_id or submitted_after, which have an index"
            raise RequestError(message, param="metadata")
        if self.pool is not None and not 1 <= len(self.pool) <= MAX_POOL_CHARS:
            raise RequestError(f"pool: must have 1 to {MAX_POOL_CHARS} characters", param="pool")
        if self.tenant is not None and not re.fullmatch(NAME_PATTERN, self.tenant):
            raise RequestError("tenant: must have 1 to 64 letters, digits, _ or -", param="tenant")

    @classmethod
    def of(cls, given: Mapping[str, Any], *, tenant: str | None) -> JobFilter:
        """Return the filter of unchecked `FilterOptions`. `background` may be the text `true` or `false`."""
        if unknown := [name for name in given if name not in FILTERS]:
            name = unknown[0][:64]
            raise RequestError(f"{name}: jobs are filtered only by tenant, {', '.join(FILTERS)}", param=name)
        background = given.get("background")
        if isinstance(background, str) and background in ("true", "false"):
            background = background == "true"
        if background not in (None, True, False):
            raise RequestError("background: must be true or false", param="background")
        return cls(
            tenant=tenant,
            pool=given.get("pool"),
            states=checked_states(given.get("state")),
            priority=checked_class(given.get("priority")),
            background=background,
            tag=checked_tag(given.get("tag")),
            submitted_after=checked_time(given.get("submitted_after"), "submitted_after"),
            submitted_before=checked_time(given.get("submitted_before"), "submitted_before"),
            custom_id=checked_custom_id(given.get("custom_id")),
            metadata=checked_metadata(given.get("metadata")),
        )

    @property
    def levels(self) -> list[int]:
        """The levels of the queue that the filter names; empty for all."""
        if self.priority is None and self.background is None:
            return []
        levels = range(NUM_LEVELS)
        of_class = [n for n in levels if self.priority in (None, class_of_level(n))]
        return [n for n in of_class if self.background in (None, is_background(n))]

    @property
    def lists(self) -> list[str]:
        """The states whose lists may have such jobs. A due one may be queued, and still listed as scheduled."""
        if not self.states:
            return list(LISTED_STATES)
        names = {"running" if state == "cancelling" else state for state in self.states}
        return [name for name in LISTED_STATES if name in names | ({"scheduled"} if "queued" in names else set())]

    def as_object(self) -> dict[str, Any]:
        """Return the parts that are given, except the tenant, as plain values that `of` takes."""
        parts = {
            "pool": self.pool,
            "state": list(self.states) or None,
            "priority": None if self.priority is None else self.priority.label,
            "background": self.background,
            "tag": self.tag,
            "submitted_after": self.submitted_after,
            "submitted_before": self.submitted_before,
            "custom_id": self.custom_id,
            "metadata": dict(sorted(self.metadata.items())) or None,
        }
        return {name: value for name, value in parts.items() if value is not None}

    def cursor(self, uuid: str) -> str:
        """Return the cursor of the jobs that are older than this part of a job's id."""
        return f"{uuid}.{self._digest()}"

    def place_of(self, cursor: str) -> str:
        """Return the part of a job's id that a cursor stands for. Raises RequestError if it belongs to another list."""
        found = re.fullmatch(_CURSOR_PATTERN, cursor)
        if found is None:
            raise RequestError("after: must be the `next` of an earlier page, or a job's id", param="after")
        if found[2] != self._digest():
            message = "after: this cursor is that of another tenant, pool or filter; begin again without it"
            raise RequestError(message, param="after")
        return found[1]

    def _digest(self) -> str:
        text = repr((self.tenant, sorted(self.as_object().items())))
        return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


def id_time(unix_s: float | None) -> str:
    """Return how the part of a job's id begins that was made at this time; empty for None."""
    if unix_s is None:
        return ""
    digits = f"{math.ceil(unix_s * 1000):012x}"
    return f"{digits[:8]}-{digits[8:]}"


# What an action changes, and its report.

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
        parts = {"not_before_s": span_of(given.get("not_before_s")), "background": given.get("background")}
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
        case "changed" | "asked_to_stop":
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


def require_filter(change: JobChange, jobs: JobFilter, *, all_jobs: bool) -> None:
    """Raise RequestError for a cancellation whose filter has no part, unless it says that it means all jobs."""
    if change.action == "cancel" and not (all_jobs or jobs.as_object()):
        message = (
            f"filter: cancel needs one of {', '.join(FILTERS)}; all_jobs (CLI: --all) means all jobs of the tenant"
        )
        raise RequestError(message, param="filter")


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
    num_asked_to_stop: int = 0
    """Running jobs that a cancellation asked to stop, and that have not ended. Those that end as canceled then count
    as changed, the others as already over. In a dry run: the running jobs that would be asked."""
    num_already_over: int = 0
    """Jobs that had ended, or for a retry: that succeeded or were retried before."""
    num_failed: int = 0
    failures: tuple[tuple[str, str], ...] = ()
    """(job id, error code) of the first failures, at most 20 per pool."""
    num_left: int | None = 0
    """Jobs that it has still to look at, also some to which its filter does not apply; None if there are more than
    1,000 tenants with jobs."""
    now_ms: int = field(default=0, compare=False)
    """Redis ms."""

    @property
    def rate_per_s(self) -> float | None:
        """Jobs per second that it has dealt with since its begin; None if that is not known."""
        num_done = self.num_changed + self.num_asked_to_stop + self.num_already_over + self.num_failed
        took_ms = (self.ended_ms or self.now_ms) - self.begun_ms
        return 1000 * num_done / took_ms if num_done and took_ms > 0 else None

    @property
    def expected_end_ms(self) -> int | None:
        """When it will have looked at all jobs at its present rate, in Unix ms, at the latest; None if not known."""
        if self.state != "running" or not self.num_left or not self.rate_per_s:
            return None
        return self.now_ms + math.ceil(1000 * self.num_left / self.rate_per_s)

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
            "asked_to_stop": self.num_asked_to_stop,
            "already_over": self.num_already_over,
            "failed": self.num_failed,
            "failures": [{"id": job_id, "code": code} for job_id, code in self.failures],
            "left": self.num_left,
            "rate_per_s": None if self.rate_per_s is None else round(self.rate_per_s, 3),
            "expected_end_ms": self.expected_end_ms,
            "now_ms": self.now_ms,
        }


def retry_id(job_id: str, bulk_id: str, begun_ms: int) -> str:
    """Return the id of the job by which a bulk action retries a job. A repeated step so finds its own job."""
    pool = job_id.partition(".")[0]
    drawn = hashlib.blake2b(f"{bulk_id}\0{job_id}".encode(), digest_size=10).hexdigest()
    made = f"{begun_ms:012x}"
    variant = "89ab"[int(drawn[3], 16) % 4]
    return f"{pool}.{made[:8]}-{made[8:]}-7{drawn[:3]}-{variant}{drawn[4:7]}-{drawn[8:20]}"
