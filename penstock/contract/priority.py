"""Priority classes of jobs, and the check of a requested class against the highest one that the caller may use."""

from __future__ import annotations

from enum import IntEnum
from typing import Literal, get_args

from penstock.contract.errors import ForbiddenError

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


def allowed_class(asked: ClassName | None, highest: ClassName, owner: str) -> Priority:
    """Return the class of a request. A request without one gets `standard`, or `highest` if that is less urgent.

    `owner` names the owner of the limit in the error message. Raises ForbiddenError for a class above `highest`.
    """
    limit = Priority.of(highest)
    if asked is None:
        return max(Priority.STANDARD, limit)
    if Priority.of(asked) < limit:
        raise class_not_allowed(Priority.of(asked), limit, owner)
    return Priority.of(asked)


def class_not_allowed(asked: Priority, highest: Priority, owner: str) -> ForbiddenError:
    """Return the error for a request of a class above the owner's `highest`."""
    message = f"priority {asked.label!r} is above the highest class of {owner}, which is {highest.label!r}"
    return ForbiddenError(message, code="class_not_allowed", param="priority")
