"""Classes of jobs, for those who know nothing else of them."""

from __future__ import annotations

from enum import IntEnum
from typing import Literal, get_args

ClassName = Literal["interactive", "standard", "batch"]
"""How callers and settings name a class."""


class Priority(IntEnum):
    """Class of a job; a lower number is more urgent."""

    INTERACTIVE = 0
    STANDARD = 1
    BATCH = 2

    @classmethod
    def of(cls, name: ClassName) -> Priority:
        """Return the class of that name."""
        return cls[name.upper()]

    @property
    def label(self) -> ClassName:
        """The name of a class as callers write it."""
        return _LABELS[self]


NUM_PRIORITIES = len(Priority)
_LABELS: tuple[ClassName, ...] = get_args(ClassName)
