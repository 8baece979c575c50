"""Classes as rights: the most urgent class that a caller may ask for."""

from __future__ import annotations

from penstock.contract.errors import ForbiddenError
from penstock.contract.priority import ClassName, Priority


def allowed_class(asked: ClassName | None, highest: ClassName, whose: str) -> Priority:
    """Return the class of a request; one that names none gets `standard`, or `highest` where that is lower.

    `whose` says in the error who set the limit. Raises ForbiddenError for a class above `highest`.
    """
    limit = Priority.of(highest)
    if asked is None:
        return max(Priority.STANDARD, limit)
    if Priority.of(asked) < limit:
        message = f"priority {asked!r} is above the highest class of {whose}, which is {highest!r}"
        raise ForbiddenError(message, code="class_not_allowed", param="priority")
    return Priority.of(asked)
