"""How the jobs of a node end."""

from __future__ import annotations

from penstock.contract.errors import PenstockError
from penstock.contract.output import Outcome
from penstock.gpu_node.jobs.held_job import HeldJob

BY_ANSWER = {
    "CANCEL": Outcome("cancelled", "cancelled", "the job was cancelled"),
    "UNREAD": Outcome("cancelled", "unread", "the job has no reader any more"),
    "EXPIRED": Outcome("expired", "deadline_exceeded", "the deadline passed before the job was done"),
}
"""Outcomes by the answer of a Redis script."""
_NO_TOKEN_LEFT = "bad_words: no token was left; they exclude every token that structured_outputs allows next"
_MODEL_ERROR = (
    "the model produced NaN or infinity, no token fitted the requested output format, "
    "or the engine's steps with this request failed or were too slow"
)


def outcome_of(job: HeldJob) -> Outcome:
    """Return the outcome of a job that has no open choice."""
    return failure_of(job, job.error) if job.has_failed_choice else Outcome("succeeded")


def failure_of(job: HeldJob, error: PenstockError | None) -> Outcome:
    """Return the outcome of a job with a choice that the engine failed at. `error`: of the request itself, if any."""
    if error is not None:
        return Outcome("failed", error.code, error.message, error.param or "")
    if job.params.structured_outputs is not None and job.params.bad_words:
        return Outcome("failed", "invalid_request", _NO_TOKEN_LEFT, "bad_words")
    return Outcome("failed", "model_error", _MODEL_ERROR)
