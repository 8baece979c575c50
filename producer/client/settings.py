"""The client's settings: one frozen record, read once from arguments and PENSTOCK_CLIENT_* variables."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from penstock.contract.job import NAME_PATTERN
from penstock.contract.priority import ClassName
from penstock.runtime.settings import Settings


class ClientSettings(Settings):
    """Limits and intervals of one client. The defaults suit any deployment."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_CLIENT_")

    name: str = Field(default="client", pattern=NAME_PATTERN)
    """The process's name. Its inbox is named by this and 64 random bits."""
    max_queued_chunks: int = Field(default=1024, ge=1, le=1 << 20)
    """Chunks queued for one slow reader; beyond that, the reader continues from the log."""
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
    outage_s: float = Field(default=30.0, ge=0, le=3600)
    """How long calls are retried while Redis is unreachable."""
