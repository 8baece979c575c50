"""Priority classes and levels of jobs, and the check of a requested class against the caller's highest one."""

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


_CLASSES = tuple(Priority)
NUM_PRIORITIES = len(_CLASSES)
NUM_LEVELS = 2 * NUM_PRIORITIES
"""Levels of the queue: the classes of foreground work, then those of background work. A lower one is served first."""
PerLevel = tuple[int, ...]
"""One number for each level."""
_LABELS: tuple[ClassName, ...] = get_args(ClassName)


def level_of(priority: Priority, background: bool) -> int:
    """Return the level of a job: background work of any class is served after all foreground work."""
    return int(priority) + NUM_PRIORITIES * background


def class_of_level(level: int) -> Priority:
    """Return the class of a level."""
    return _CLASSES[level % NUM_PRIORITIES]


def is_background(level: int) -> bool:
    """Return whether a level is one of background work."""
    return level >= NUM_PRIORITIES


def level_label(level: int) -> str:
    """Return what people read as a level: its class, and whether it is background work."""
    return class_of_level(level).label + (", background" if is_background(level) else "")


def default_class(background: bool) -> Priority:
    """Return the class of a request that names none."""
    return Priority.BATCH if background else Priority.STANDARD


def allowed_class(
    asked: ClassName | None, highest: ClassName, owner: str, default: Priority = Priority.STANDARD
) -> Priority:
    """Return the class of a request. A request without one gets `default`, or `highest` if that is less urgent.

    `owner` names the owner of the limit in the error message. Raises ForbiddenError for a class above `highest`.
    """
    limit = Priority.of(highest)
    if asked is None:
        return max(default, limit)
    if Priority.of(asked) < limit:
        raise class_not_allowed(Priority.of(asked), limit, owner)
    return Priority.of(asked)


def class_not_allowed(asked: Priority, highest: Priority, owner: str) -> ForbiddenError:
    """Return the error for a request of a class above the owner's `highest`."""
    message = f"priority {asked.label!r} is above the highest class of {owner}, which is {highest.label!r}"
    return ForbiddenError(message, code="class_not_allowed", param="priority")
