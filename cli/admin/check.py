"""One line of `penstock doctor`."""

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
