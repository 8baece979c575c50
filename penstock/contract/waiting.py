"""Updates about a job before its first token: its position in the queue, then the progress of its prompt."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class QueuePosition:
    """The estimated position of a job in its pool's queue.

    `position` is 1 for the job that would be next if the queue went by class and age, and 0 once a node has the job.
    The pool's policy may take jobs in another order. `estimated_wait_ms` is None while no node has measured its pace.
    """

    position: int
    estimated_wait_ms: int | None


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """How many tokens of a job's prompt a node has computed. If a prompt is computed again, its count restarts."""

    total: int
    """Tokens of the prompt."""
    cached: int
    """Tokens that the prefix cache supplied."""
    processed: int
    """Tokens computed so far, the cached ones included."""
    time_ms: int
    """Milliseconds since the computation began."""


WaitUpdate = QueuePosition | PrefillProgress


def members_of(update: WaitUpdate) -> dict[str, dict[str, int | None]]:
    """Return an update as a member of a JSON object. `prompt_progress` has the names that llama.cpp's server uses."""
    if isinstance(update, QueuePosition):
        return {"queue_progress": {"position": update.position, "estimated_wait_ms": update.estimated_wait_ms}}
    tokens = {"total": update.total, "cache": update.cached, "processed": update.processed}
    return {"prompt_progress": {**tokens, "time_ms": update.time_ms}}
