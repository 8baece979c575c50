"""How jobs end: by what Redis answered, or by what became of their choices."""

from __future__ import annotations

from penstock.contract.job import Outcome
from penstock.gpu_node.ledger import HeldJob

BY_ANSWER = {
    "CANCEL": Outcome("cancelled", "cancelled", "the job was cancelled"),
    "UNHEARD": Outcome("cancelled", "unread", "nobody reads this job any more"),
    "EXPIRED": Outcome("expired", "deadline_exceeded", "the deadline passed before the job was done"),
}
"""Ends that a script's answer says."""
_NO_TOKEN_LEFT = "bad_words: no token was left; they exclude every token that structured_outputs allows next"
_MODEL_ERROR = (
    "the model's output was not finite, no token fitted the form that is asked for, "
    "or its steps failed or were slow where those of others were not"
)


def outcome_of(job: HeldJob) -> Outcome:
    """How a job ends whose choices have all ended."""
    if not job.has_failed_choice:
        return Outcome("done")
    if (error := job.error) is not None:
        return Outcome("failed", error.code, error.message, error.param or "")
    if job.params.structured_outputs is not None and job.params.bad_words:
        return Outcome("failed", "invalid_request", _NO_TOKEN_LEFT, "bad_words")
    return Outcome("failed", "model_error", _MODEL_ERROR)
