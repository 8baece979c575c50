"""Priority classes of jobs."""

from __future__ import annotations

from enum import IntEnum
from typing import Literal, get_args

ClassName = Literal["interactive", "standard", "batch"]
"""The name of a class in the API and in settings."""


class Priority(IntEnum):
    """Priority class of a job; a lower number is more urgent."""

    INTERACTIVE = 0
    STANDARD = 1
    BATCH = 2

    @classmethod
    def of(cls, name: ClassName) -> Priority:
        """Return the class named `name`."""
        return cls[name.upper()]

    @property
    def label(self) -> ClassName:
        """The class's name in the API."""
        return _LABELS[self]


NUM_PRIORITIES = len(Priority)
_LABELS: tuple[ClassName, ...] = get_args(ClassName)
