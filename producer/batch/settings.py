"""Settings of Celery workers and of processes that send them tasks, from PENSTOCK_CELERY_* variables."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from penstock.runtime.settings import Settings


class CelerySettings(Settings):
    """Settings of Celery's broker and results. The job queue is set with PENSTOCK_REDIS_URL instead."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_CELERY_")

    broker_url: str | None = None
    """URL of Celery's Redis, also one of Sentinel, but no cluster. Default: the Redis of the job queue."""
    task_lease_s: float = Field(default=10.0, ge=1.0)
    """Seconds without a renewal after which another worker gets a worker's tasks. All workers need the same value."""
    visibility_timeout_s: int = Field(default=300, ge=1)
    """Seconds after which Celery queues an unrenewed task again, by the clock of its Redis."""
    soft_shutdown_s: float = Field(default=5.0, ge=0)
    """Seconds that running tasks get to finish when a worker is stopped at once. The others return to the queue."""
    stored_batches: bool = True
    """Whether a worker also runs the batches of `/v1/batches`. It needs PENSTOCK_FILES_URL, as gateways have it."""
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Port for a worker's Prometheus metrics; 0: a free port, named in the log. Default: metrics are off."""
    metrics_host: str = "127.0.0.1"
    """Address on which metrics are served."""
    result_ttl_s: int = Field(default=86_400, ge=1)
    """Seconds for which a task's result is kept."""
