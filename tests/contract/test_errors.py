"""The error hierarchy equals the documented one, and each outcome becomes the right error."""

from __future__ import annotations

import pickle
import re
from typing import Any

import pytest

from penstock.contract import errors
from penstock.contract.errors import (
    BusyError,
    JobCancelledError,
    JobExpiredError,
    JobFailedError,
    NotFoundError,
    PenstockError,
    PromptTooLongError,
    RequestError,
    TooLargeError,
    UnavailableError,
    error_of,
)
from penstock.contract.output import Outcome


def _is_ours(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, PenstockError)


CLASSES: list[type[PenstockError]] = [cls for _, cls in sorted(vars(errors).items()) if _is_ours(cls)]


def drawn_tree() -> dict[str, tuple[str, int]]:
    """Return name → (name of its parent, status) from the tree in the module's docstring."""
    tree: dict[str, tuple[str, int]] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        if found := re.match(r"^    ([│ ]*)(?:[├└]── )?(\w+Error)\b(?: +(\d{3}))?", line):
            bars, name, status = found.groups()
            depth = 0 if name == "PenstockError" else 1 + len(bars) // 4
            path[depth:] = [name]
            tree[name] = (path[depth - 1] if depth else "Exception", int(status or 500))
    return tree


def test_docstring_shows_the_whole_error_tree() -> None:
    assert drawn_tree() == {cls.__name__: (cls.__bases__[0].__name__, cls.status) for cls in CLASSES}


@pytest.mark.parametrize("cls", CLASSES)
def test_error_carries_message_code_and_field(cls: type[PenstockError]) -> None:
    waiting: dict[str, Any] = {"retry_after_ms": 7} if cls is BusyError else {}
    error = cls("what happened", code="special", **waiting)
    assert (str(error), error.message, error.code, error.param) == ("what happened", "what happened", "special", None)
    assert cls("x", **waiting).code == cls.code != ""
    assert cls.code == "internal_error" or cls.type


@pytest.mark.parametrize("cls", CLASSES)
def test_error_survives_pickling(cls: type[PenstockError]) -> None:
    error = cls("what happened", code="special", **({"retry_after_ms": 7} if cls is BusyError else {}))
    error.param = "field"
    there = pickle.loads(pickle.dumps(error))
    assert type(there) is cls and there.args == error.args and vars(there) == vars(error)


def test_callers_faults_are_4xx_and_ours_5xx() -> None:
    for cls in CLASSES:
        mendable = issubclass(cls, (RequestError, BusyError, JobCancelledError))
        assert 400 <= cls.status < 500 if mendable else 500 <= cls.status < 600


@pytest.mark.parametrize(
    ("outcome", "kind", "code"),
    [
        (Outcome("cancelled", "unread", "nobody"), JobCancelledError, "cancelled"),
        (Outcome("expired"), JobExpiredError, "deadline_exceeded"),
        (Outcome("expired", "not_started_in_time"), JobExpiredError, "not_started_in_time"),
        (Outcome("failed", "node_lost", "its nodes died"), JobFailedError, "node_lost"),
        (Outcome("failed"), JobFailedError, "job_failed"),
        (Outcome("failed", "invalid_request", "no", "stop"), RequestError, "invalid_request"),
        (Outcome("failed", "context_length_exceeded", "no", "prompt"), PromptTooLongError, "context_length_exceeded"),
        (Outcome("failed", "too_large", "no"), TooLargeError, "too_large"),
        (Outcome("failed", "not_found", "no"), NotFoundError, "not_found"),
        (Outcome("failed", "unavailable", "no"), UnavailableError, "unavailable"),
    ],
)
def test_outcome_becomes_its_error(outcome: Outcome, kind: type[PenstockError], code: str) -> None:
    error = error_of(outcome)
    assert type(error) is kind
    assert error.code == code
    assert error.message == (outcome.message or f"job {outcome.state}")
    if outcome.state == "failed":
        assert error.param == (outcome.param or None)
