"""What is paused of a pool: the whole pool, a class or a tenant. Nodes take no job of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.contract.errors import POOL_PAUSED, RequestError, UnavailableError
from penstock.contract.output import PausedKind
from penstock.contract.priority import NUM_LEVELS, Priority, class_of_level, is_background

RETRY_MS = 5_000
"""Milliseconds after which such a caller may try again. When an operator ends a pause is not known."""


@dataclass(frozen=True, slots=True)
class Pause:
    """What is paused of a pool: one tenant, one level, or with neither the whole pool. Nodes take no such job."""

    pool: str
    since_ms: int
    tenant: str | None = None
    level: int | None = None

    @property
    def kind(self) -> PausedKind:
        """What kind of thing is paused."""
        return "tenant" if self.tenant is not None else "pool" if self.level is None else "class"

    @property
    def words(self) -> str:
        """What is paused, in words, such as `class batch (background)`."""
        if self.tenant is not None:
            return f"tenant {self.tenant}"
        if self.level is None:
            return "the pool"
        return f"class {class_of_level(self.level).label} ({_kind_of_work(self.level)})"

    def as_object(self) -> dict[str, Any]:
        """Return the pause as a JSON object."""
        of_level = {}
        if self.level is not None:
            of_level = {"priority": class_of_level(self.level).label, "background": is_background(self.level)}
        of_tenant = {} if self.tenant is None else {"tenant": self.tenant}
        return {"pool": self.pool, **of_tenant, **of_level, "since_ms": self.since_ms}


def _kind_of_work(level: int) -> str:
    return "background" if is_background(level) else "foreground"


def paused_error(pause: Pause) -> UnavailableError:
    """Return the error for a caller whose job is held back by a pause."""
    message = f"{pause.words} is paused: nodes take no such job until an operator resumes it"
    error = UnavailableError(message, code=POOL_PAUSED, retry_after_ms=RETRY_MS)
    error.pool = pause.pool
    return error


def pause_names(tenant: str | None, priority: Priority | None, background: bool | None) -> list[str]:
    """Return the fields of P:paused for a tenant, for the levels of a class, or for the pool.

    Raises RequestError for a tenant together with a class.
    """
    if tenant is not None:
        if priority is not None or background is not None:
            raise RequestError("tenant: not allowed together with priority or background", param="tenant")
        return [f"tenant:{tenant}"]
    if priority is None and background is None:
        return ["pool"]
    levels = [n for n in range(NUM_LEVELS) if priority in (None, class_of_level(n))]
    return [f"level:{n}" for n in levels if background in (None, is_background(n))]
