"""A tenant's limits and scheduling weight. A trusted submitter, a gateway or a client, states them at each submit."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

NO_LIMIT = 0
ACCOUNT_PATTERN = r"^[A-Za-z0-9_-]{0,64}$"


class Terms(BaseModel):
    """A tenant's limits and weight in one pool.

    The submit script enforces them, so they hold across all processes that submit for the tenant. Rates allow a burst
    of `burst_s` seconds' worth at once. Tokens are charged by predicted cost. When a job ends, the charge is corrected
    to its actual prompt and output tokens.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_open_jobs: int = Field(default=NO_LIMIT, ge=0)
    """Jobs that are queued or running."""
    max_queued_cost: int = Field(default=NO_LIMIT, ge=0)
    """Predicted KV tokens of the queued jobs."""
    jobs_per_minute: int = Field(default=NO_LIMIT, ge=0)
    tokens_per_minute: int = Field(default=NO_LIMIT, ge=0)
    weight: float = Field(default=1.0, ge=0.001, le=1000)
    """Under policy `fair`, a tenant of weight 2 gets twice as much service as a tenant of weight 1."""
    burst_s: int = Field(default=10, ge=1, le=3600)
    memory_percent: int = Field(default=NO_LIMIT, ge=0, le=90)
    """Percent of Redis's memory that the tenant's jobs and results may take; 0 applies the pool's own limit."""
    account: str = Field(default="", pattern=ACCOUNT_PATTERN)
    """Account within the tenant to which used tokens are counted: an API key's id, empty for direct Redis clients."""

    def without_limits(self) -> Terms:
        """Return terms for resubmitting a job that was accepted before and must not be refused now."""
        return Terms(weight=self.weight, account=self.account)


UNLIMITED = Terms()
