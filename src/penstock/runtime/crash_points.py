"""Named points at which a process may be killed without losing a job. Fault tests kill it there."""

from __future__ import annotations


def point(when: str, what: str) -> None:
    """Mark that this process is `before` or `after` an operation. It does nothing; fault tests replace it."""
