"""What a client may be told: one frozen record, read once from arguments and PENSTOCK_CLIENT_* variables."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from penstock.contract.job import NAME_PATTERN
from penstock.contract.priority import ClassName
from penstock.runtime.settings import Settings


class ClientSettings(Settings):
    """Bounds and clocks of one reading process; the defaults suit any deployment."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_CLIENT_")

    name: str = Field(default="client", pattern=NAME_PATTERN)
    """The process's name; its inbox is this and 64 random bits."""
    max_queued_chunks: int = Field(default=1024, ge=1, le=1 << 20)
    """Chunks that may wait for one slow reader before it goes on from the log."""
    echo_interval_s: float = Field(default=2.0, gt=0, le=60)
    """How often the inbox proves to itself that its subscription lives."""
    silent_after_s: float = Field(default=5.0, gt=0, le=300)
    """How long a stream may be silent before its state is compared with the broker's."""
    read_beat_interval_s: float = Field(default=1.0, gt=0, le=10)
    """How often a pool with open streams hears that its reader lives; pools give up on readers after 30 s."""
    weight: float = Field(default=1.0, ge=0.001, le=1000)
    """Of this client's tenant under fair turns, for jobs that are submitted without terms of their own."""
    highest_class: ClassName = "interactive"
    """The most urgent class that this client may submit; whoever reaches Redis is trusted, so by default any."""
    memory_percent: int = Field(default=0, ge=0, le=90)
    """Percent of Redis's memory that its tenant's jobs and results may take; 0: as the pool's nodes are told."""
    outage_s: float = Field(default=30.0, ge=0, le=3600)
    """How long an absence of Redis is waited out."""
