"""The counters of a client."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from penstock.contract.errors import ForbiddenError, PenstockError, PromptTooLongError, RequestError, UnavailableError

ADMITTED = "admitted"
_DECISION_OF_CODE = {
    "pool_busy": "busy",
    "redis_full": "memory",
    "rate_limit_exceeded": "tenant_limit",
    "memory_share_exceeded": "tenant_memory",
    "no_node": "no_node",
    "id_conflict": "conflict",
    "idempotency_conflict": "conflict",
}
_DECISION_OF_ERROR: tuple[tuple[type[PenstockError], str], ...] = (
    (UnavailableError, "unavailable"),
    (PromptTooLongError, "too_long"),
    (ForbiddenError, "not_allowed"),
    (RequestError, "invalid"),
    (PenstockError, "error"),
)
"""Class of error → decision, for codes without a decision of their own. The first class that fits counts."""
DECISIONS = (ADMITTED, *dict.fromkeys([*_DECISION_OF_CODE.values(), *(name for _, name in _DECISION_OF_ERROR)]))
"""The decisions about a submission: it is admitted, or refused for one of these reasons."""


@dataclass(slots=True)
class ClientStats:
    """Counters of one client since its creation. A run without faults has no log reads, gaps or resubscribes."""

    messages: int = 0
    chunks: int = 0
    bad_messages: int = 0
    log_reads: int = 0
    gaps: int = 0
    resubscribes: int = 0
    resubmits: int = 0
    decisions: Counter[str] = field(default_factory=Counter)
    """Submissions by decision, one of `DECISIONS`."""


def decision_of(error: PenstockError) -> str:
    """Return the decision under which a submission with this error is counted."""
    by_kind = next(name for kind, name in _DECISION_OF_ERROR if isinstance(error, kind))
    return _DECISION_OF_CODE.get(error.code, by_kind)
