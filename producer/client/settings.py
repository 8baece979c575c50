"""The client's settings and counters."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from penstock.contract.durability import MEMORY, Durability
from penstock.contract.errors import (
    POOL_PAUSED,
    ForbiddenError,
    PenstockError,
    PromptTooLongError,
    RequestError,
    UnavailableError,
)
from penstock.contract.fields import NAME_PATTERN
from penstock.contract.priority import ClassName
from penstock.runtime.settings import Settings

# The counters of a client.

ADMITTED = "admitted"
_DECISION_OF_CODE = {
    "pool_busy": "busy",
    "redis_full": "memory",
    "rate_limit_exceeded": "tenant_limit",
    "memory_share_exceeded": "tenant_memory",
    "no_node": "no_node",
    POOL_PAUSED: "paused",
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
    histories: int = 0
    """Times that Redis had a new history: after a restart, a fail-over or a restore."""
    decisions: Counter[str] = field(default_factory=Counter)
    """Submissions by decision, one of `DECISIONS`."""


def decision_of(error: PenstockError) -> str:
    """Return the decision under which a submission with this error is counted."""
    by_kind = next(name for kind, name in _DECISION_OF_ERROR if isinstance(error, kind))
    return _DECISION_OF_CODE.get(error.code, by_kind)


# The client's settings: one frozen record, read once from arguments and PENSTOCK_CLIENT_* variables.


class ClientSettings(Settings):
    """Limits and intervals of one client. The defaults suit any deployment."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_CLIENT_")

    name: str = Field(default="client", pattern=NAME_PATTERN)
    """The process's name. Its inbox is named by this and 64 random bits."""
    max_queued_chunks: int = Field(default=1024, ge=1, le=1 << 20)
    """Chunks queued for one slow reader; beyond that, the reader continues from the log."""
    max_kept_mib: int = Field(default=0, ge=0, le=1 << 20)
    """MiB of requests that are kept for submitting open jobs again that Redis lost; a gateway keeps 64 by default. One
    tenant has a quarter of it. Beyond that, the oldest requests are dropped. 0: no limit."""
    echo_interval_s: float = Field(default=2.0, gt=0, le=60)
    """How often the inbox checks that its subscription is alive, by a message to itself."""
    silent_after_s: float = Field(default=5.0, gt=0, le=300)
    """How long a stream may be silent before it asks the broker for the job's state."""
    reader_heartbeat_interval_s: float = Field(default=1.0, gt=0, le=10)
    """Interval of heartbeats to each pool with open streams; pools forget a reader after 30 s without one."""
    weight: float = Field(default=1.0, ge=0.001, le=1000)
    """The tenant's weight under `fair` scheduling, for jobs submitted without their own terms."""
    highest_class: ClassName = "interactive"
    """The most urgent class that this client may submit. Clients of Redis are trusted, so the default allows all."""
    memory_percent: int = Field(default=0, ge=0, le=90)
    """Percent of Redis's memory for the tenant's jobs and results; 0 uses the setting of the pool's nodes."""
    queue_without_node: bool = False
    """Whether jobs are queued even while their pool has no live node. A node that comes later takes them."""
    durability: Durability = MEMORY
    """What submissions of jobs that go on without a reader, and deletions of responses, wait for: `memory`; `fsync`,
    Redis's disk; or `replicated`, a replica."""
    token_durability: Durability = MEMORY
    """What readers of streams and results wait for before they get a token: `memory`; `fsync`, Redis's disk; or
    `replicated`, a replica."""
    failover_keep_s: float = Field(default=30.0, ge=0, le=600)
    """Seconds for which accepted submissions, cancellations and deletions are kept. If a fail-over loses them, they are
    repeated. The requests of jobs that this client still holds are kept as long as these are open."""
    failover_keep_mib: int = Field(default=64, ge=0, le=1 << 20)
    """Most MiB of requests that are kept for that."""
    outage_s: float = Field(default=30.0, ge=0, le=3600)
    """How long calls are retried while Redis is unreachable."""
