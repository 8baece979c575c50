"""Classes of jobs, for those who know nothing else of them."""

from __future__ import annotations

from enum import IntEnum


class Priority(IntEnum):
    """Class of a job; a lower number is more urgent."""

    INTERACTIVE = 0
    STANDARD = 1
    BATCH = 2


NUM_PRIORITIES = len(Priority)
