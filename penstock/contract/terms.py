"""A tenant's limits and scheduling weight. A trusted submitter, a gateway or a client, states them at each submit."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

NO_LIMIT = 0
MAX_LIMIT = 10**12
"""The largest limit. Lua counts in floats, which are exact up to 2**53."""
ACCOUNT_PATTERN = r"^[A-Za-z0-9_-]{0,64}$"


class Terms(BaseModel):
    """A tenant's limits and weight in one pool.

    The submit script enforces them, so they hold across all processes that submit for the tenant. Rates allow a burst
    of `burst_s` seconds' worth at once. Tokens are charged by predicted cost. When a job ends, the charge is corrected
    to its actual prompt and output tokens. A job that might exceed the tokens of a minute waits, see PROTOCOL.md.
    """

    # The docstrings are the help texts of `penstock keys`.
    model_config = ConfigDict(frozen=True, extra="forbid")

    max_open_jobs: int = Field(default=NO_LIMIT, ge=0, le=MAX_LIMIT)
    """Most jobs that wait or run, per pool and over all of the tenant's keys. 0: no limit."""
    max_queued_cost: int = Field(default=NO_LIMIT, ge=0, le=MAX_LIMIT)
    """Most predicted KV tokens of waiting jobs, per pool and over all of the tenant's keys. 0: no limit."""
    jobs_per_minute: int = Field(default=NO_LIMIT, ge=0, le=MAX_LIMIT)
    """Most jobs submitted per minute, per pool and over all of the tenant's keys. 0: no limit."""
    tokens_per_minute: int = Field(default=NO_LIMIT, ge=0, le=MAX_LIMIT)
    """Most prompt and output tokens per minute, per pool and over all of the tenant's keys. 0: no limit."""
    weight: float = Field(default=1.0, ge=0.001, le=1000)
    """Share of a busy pool under the policy fair. A tenant of weight 2 gets twice as much as one of weight 1."""
    burst_s: int = Field(default=10, ge=1, le=3600)
    """Burst of a rate limit: this many seconds' worth may come at once."""
    memory_percent: int = Field(default=NO_LIMIT, ge=0, le=90)
    """Percent of Redis's memory that the tenant's jobs and results may take. 0: as set for the pool."""
    account: str = Field(default="", pattern=ACCOUNT_PATTERN)
    """Account within the tenant to which used tokens are counted: an API key's id, empty for direct Redis clients."""

    def without_limits(self) -> Terms:
        """Return terms for resubmitting a job that was accepted before and must not be refused now."""
        return Terms(weight=self.weight, account=self.account)


UNLIMITED = Terms()
