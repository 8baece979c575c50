"""The check of a requested priority class against the highest class that the caller may use."""

from __future__ import annotations

from penstock.contract.errors import ForbiddenError
from penstock.contract.priority import ClassName, Priority


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
