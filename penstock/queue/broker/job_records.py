"""Jobs' records as clients see them: the state of a job with its ledger."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from redis.asyncio import Redis

from penstock.contract.job import Priority
from penstock.contract.job_ledger import JobLedger, LeaseEnd, PastLease
from penstock.contract.output import TERMINAL_STATES, Outcome, Usage
from penstock.contract.waiting import QueuePosition
from penstock.queue import keys
from penstock.queue.broker.connection import translated

STATUS_FIELDS = (
    *("state", "tenant", "priority", "submitted", "taken", "first", "finished", "node", "chunks", "preemptions"),
    *("losses", "code", "message", "param", "stored", "used", "retaken", "past_leases", "num_past_leases"),
    "engine_preemptions",
)
"""The fields of a job's hash that `status_of` needs."""


@dataclass(frozen=True, slots=True)
class JobStatus:
    """State of a job. Times are Redis ms, 0 for a stage not reached yet."""

    job_id: str
    state: str
    priority: Priority
    num_chunks: int
    outcome: Outcome | None
    submitted_ms: int
    taken_ms: int
    first_ms: int
    finished_ms: int
    preemptions: int
    losses: int
    num_waiting_ahead: int
    """The queued jobs of more urgent classes and the older ones of its class, while it is queued."""
    ledger: JobLedger
    tenant: str = "default"
    large_result_bytes: int = 0
    """Size of the result if it is large, else 0."""
    queue_position: QueuePosition | None = None
    """The estimated position of a queued job, if a client's `status` has read it. None if the job is delayed."""


def status_of(job_id: str, fields: Mapping[str, str], num_chunks: int = 0, num_ahead: int = 0) -> JobStatus:
    """Return a job's state from STATUS_FIELDS of its record.

    `num_chunks`: the length of its log, while the record does not say it. `num_ahead`: the jobs queued before it.
    """
    ledger = ledger_of(fields)
    return JobStatus(
        *(job_id, fields["state"], Priority(int(fields["priority"])), int(fields["chunks"] or num_chunks)),
        outcome_of(fields),
        *times_ms_of(fields),
        *(ledger.preemptions, ledger.losses, num_ahead),
        ledger,
        tenant=fields["tenant"],
        large_result_bytes=large_result_bytes_of(fields),
    )


def large_result_bytes_of(fields: Mapping[str, str]) -> int:
    """Return the size of a job's result if it is large, else 0."""
    stored = fields["stored"].split()
    return int(stored[1]) if len(stored) > 1 else 0


def ledger_of(fields: Mapping[str, str]) -> JobLedger:
    """Return a job's ledger from STATUS_FIELDS of its record."""
    usage, kv_token_ms = _used(fields["used"])
    return JobLedger(
        fields["state"],
        *times_ms_of(fields),
        node_id=fields["node"],
        retaken_ms=int(fields["retaken"] or 0),
        past_leases=tuple(_past_leases(fields["past_leases"])),
        num_past_leases=int(fields["num_past_leases"] or 0),
        preemptions=int(fields["preemptions"] or 0),
        engine_preemptions=int(fields["engine_preemptions"] or 0),
        losses=int(fields["losses"] or 0),
        usage=usage,
        kv_token_ms=kv_token_ms,
    )


def outcome_of(fields: Mapping[str, str]) -> Outcome | None:
    """Return how a job ended, or None for an open job."""
    state = fields["state"]
    if state not in TERMINAL_STATES:
        return None
    return Outcome(cast(Any, state), fields["code"], fields["message"], fields["param"])


def times_ms_of(fields: Mapping[str, str]) -> tuple[int, int, int, int]:
    """Return when a job was submitted, first taken, got its first token, and finished; 0 for a stage not reached."""
    submitted, taken, first, finished = (int(fields[f] or 0) for f in ("submitted", "taken", "first", "finished"))
    return submitted, taken, first, finished


async def past_leases_of(redis: Redis, job_id: str) -> tuple[PastLease, ...]:
    """Read which leases of a job have ended before the job did; the newest 8."""
    with translated():
        text = await cast(Any, redis).hget(keys.job(job_id), "past_leases")
    return tuple(_past_leases((text or b"").decode()))


def _past_leases(text: str) -> Iterator[PastLease]:
    """Parse `<node>@<taken>-<ended>:<why>`, separated by spaces."""
    for entry in text.split():
        lease, _, why = entry.rpartition(":")
        node_id, _, times = lease.rpartition("@")
        taken_ms, _, ended_ms = times.partition("-")
        yield PastLease(node_id, int(taken_ms), int(ended_ms), cast(LeaseEnd, why))


def _used(text: str) -> tuple[Usage | None, int | None]:
    """Parse `<prompt> <completion> <cached> <kv_token_ms>`, or nothing for an open job."""
    prompt, _, rest = text.partition(" ")
    if not prompt:
        return None, None
    completion, cached, kv_token_ms = rest.split(" ")
    return Usage(int(prompt), int(completion), int(cached)), int(kv_token_ms) if kv_token_ms else None
