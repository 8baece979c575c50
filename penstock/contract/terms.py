"""What a tenant is entitled to, as somebody who is trusted says at each submit: a gateway's key record, or a client."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

NO_LIMIT = 0
ACCOUNT_PATTERN = r"^[A-Za-z0-9_-]{0,64}$"


class Terms(BaseModel):
    """A tenant's limits and weight in one pool; they are held by the queue itself, over all who submit for the tenant.

    Rates are smooth: `burst_s` seconds' worth may come at once. Tokens are charged by predicted cost; the end of a job
    corrects the charge to the tokens of its prompt and output.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_open_jobs: int = Field(default=NO_LIMIT, ge=0)
    """Jobs that wait or run."""
    max_queued_cost: int = Field(default=NO_LIMIT, ge=0)
    """KV tokens of the jobs that wait."""
    jobs_per_minute: int = Field(default=NO_LIMIT, ge=0)
    tokens_per_minute: int = Field(default=NO_LIMIT, ge=0)
    weight: float = Field(default=1.0, ge=0.001, le=1000)
    """Under fair turns a tenant of weight 2 gets twice as much as one of weight 1."""
    burst_s: int = Field(default=10, ge=1, le=3600)
    memory_percent: int = Field(default=NO_LIMIT, ge=0, le=90)
    """Percent of Redis's memory that the tenant's jobs and results may take; 0: as the pool's nodes are told."""
    account: str = Field(default="", pattern=ACCOUNT_PATTERN)
    """What used tokens are counted to beside the tenant: an API key's id, nothing for clients of Redis."""

    def without_limits(self) -> Terms:
        """Of a job that was accepted once, and may not be refused any more."""
        return Terms(weight=self.weight, account=self.account)


UNLIMITED = Terms()
