"""What a Celery worker, and whoever sends it tasks, may be told: PENSTOCK_CELERY_* variables."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from penstock.runtime.settings import Settings


class CelerySettings(Settings):
    """Celery's own broker and results; the queue of jobs is PENSTOCK_REDIS_URL's."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_CELERY_")

    broker_url: str | None = None
    """None: the Redis of the queue. It must be a plain one, not a cluster."""
    task_lease_s: float = Field(default=10.0, ge=1.0)
    """A worker that has not renewed its tasks for so long is dead; another one gets them. The same for all workers."""
    visibility_timeout_s: int = Field(default=300, ge=1)
    """When a task comes back that no living worker looks after, by the clocks of its workers' machines."""
    soft_shutdown_s: float = Field(default=5.0, ge=0)
    """How long short tasks may go on when a worker is stopped at once; longer ones go back to the queue."""
    result_ttl_s: int = Field(default=86_400, ge=1)
    """How long a task's result is kept."""
