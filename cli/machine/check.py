"""A line of the report of `penstock doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report."""

    level: Literal["ok", "warn", "fail"]
    subject: str
    finding: str
    advice: str = ""
    """What the operator should do. Empty: nothing."""
    redis: str = ""
    """Which of several Redis it is about (`redis_names_of`). Empty: the only one, or this machine."""
