"""Jobs as plain JSON objects, for the HTTP API and the command line."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from penstock.contract.job import pool_of
from penstock.contract.output import UNKNOWN_WAIT, JobLedger, LedgerEvent, Outcome, Usage
from penstock.queue.broker.completions import Completion
from penstock.queue.broker.jobs import JobStatus


def job_object(status: JobStatus, *, shows_text: bool = True) -> dict[str, Any]:
    """Return a job's state and ledger, without its result.

    `model` is null for a job of an earlier release. `max_tokens` is present if the context lowered it, and `retry_of`
    if the job repeats another one. `attempt` and `max_attempts` are present if it may be or was tried again, and
    `retried_as` if another job took its place. `first_words`, `webhooks`, `channel`, `concurrency_key` and
    `custom_id` are present if it has them. `shows_text` says whether the first words of its prompt are shown.
    """
    shown = {
        "id": status.job_id,
        "object": "job",
        "pool": pool_of(status.job_id),
        "model": status.model or None,
        "tenant": status.tenant,
        "priority": status.priority.label,
        "background": status.is_background,
        "state": status.state,
        "num_chunks": status.num_chunks,
        "outcome": None if status.outcome is None else outcome_object(status.outcome),
        "tags": list(status.tags),
        "metadata": None if status.metadata is None else dict(status.metadata),
        "ledger": ledger_object(status.ledger),
    }
    webhooks = list(status.webhooks) or None
    given = {
        "first_words": (shows_text and status.first_words) or None,
        "custom_id": status.custom_id,
        "max_tokens": status.max_tokens,
        "concurrency_key": status.concurrency_key,
        "retry_of": status.retry_of,
        "retried_as": status.retried_as,
        "attempt": status.attempt if status.attempt > 1 or status.max_attempts else None,
        "max_attempts": status.max_attempts,
        "webhooks": webhooks,
        "channel": status.channel,
    }
    return shown | {name: value for name, value in given.items() if value is not None}


def completion_object(completion: Completion) -> dict[str, Any]:
    """Return a job that has ended, as the events of `/v1/jobs/events` show it."""
    return {
        "object": "job.completion",
        "id": completion.job_id,
        "pool": completion.pool,
        "state": completion.state,
        "tags": completion.tags,
        "finished_ms": completion.finished_ms,
    }


def queue_members(status: JobStatus) -> dict[str, int | str | None]:
    """Return the members that only a queued job has: position in the queue, wait, and what is paused.

    A delayed job has no position yet.
    """
    position = status.queue_position
    return {
        "num_waiting_ahead": status.num_waiting_ahead,
        "position": None if position is None else position.position,
        **(UNKNOWN_WAIT if position is None else position.wait)._asdict(),
        "paused": None if position is None else position.paused,
    }


def outcome_object(outcome: Outcome) -> dict[str, str]:
    """Return how a job ended. For `succeeded`, the other members are empty."""
    return {"state": outcome.state, "code": outcome.code, "message": outcome.message, "param": outcome.param}


def usage_object(usage: Usage) -> dict[str, int]:
    """Return the tokens that a job used."""
    return asdict(usage)


def ledger_object(ledger: JobLedger) -> dict[str, Any]:
    """Return a job's ledger. Times are Unix milliseconds by Redis's clock, null for a stage not reached yet."""
    return {
        "queued_ms": ledger.queued_ms,
        "taken_ms": ledger.taken_ms or None,
        "first_token_ms": ledger.first_token_ms or None,
        "finished_ms": ledger.finished_ms or None,
        "node": ledger.node_id or None,
        "losses": ledger.losses,
        "preemptions": ledger.preemptions,
        "engine_preemptions": ledger.engine_preemptions,
        "num_past_leases": ledger.num_past_leases,
        "usage": None if ledger.usage is None else usage_object(ledger.usage),
        "kv_token_seconds": None if ledger.kv_token_ms is None else ledger.kv_token_ms / 1000,
        "events": [_event_object(event) for event in ledger.events()],
    }


def _event_object(event: LedgerEvent) -> dict[str, Any]:
    named = {"node": event.node_id, "from_node": event.from_node_id, "reason": event.reason}
    return {"event": event.event, "at_ms": event.at_ms} | {name: value for name, value in named.items() if value}
