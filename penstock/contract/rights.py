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
        message = f"priority {asked!r} is above the highest class of {owner}, which is {highest!r}"
        raise ForbiddenError(message, code="class_not_allowed", param="priority")
    return Priority.of(asked)
