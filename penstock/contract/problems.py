"""The first thing that pydantic finds wrong, as one error of ours that names the field as its caller wrote it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from penstock.contract.errors import ConfigError, PenstockError, RequestError
from penstock.contract.named import UNKNOWN_FIELD

MAX_NAME_CHARS = 128
"""A field's name may come from a request, so what is echoed of it is bounded."""
_CODES = {"extra_forbidden": UNKNOWN_FIELD, UNKNOWN_FIELD: UNKNOWN_FIELD, "unsupported_value": "unsupported_value"}
"""By pydantic's kinds of errors, and our own ones."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with which field; its text is both."""

    said: str
    param: str | None = None
    """As in Python, `messages[0].role`; None: the whole."""
    code: str | None = None

    def __str__(self) -> str:
        return f"{self.param}: {self.said}" if self.param else self.said


def problem_of(error: ValidationError, names: Mapping[str, str] | None = None) -> Problem:
    """The first problem; `names` tells what callers call a field of ours, where they call it otherwise.

    It does not show the input, which may be somebody's prompt and may end in a log.
    """
    first = error.errors(include_url=False, include_input=False)[0]
    loc = list(first["loc"])
    if loc:
        loc[0] = (names or {}).get(str(loc[0]), loc[0])
    unknown = first.get("ctx", {}).get(UNKNOWN_FIELD)
    if unknown is not None:
        loc.append(unknown)
    code = _CODES.get(first["type"])
    said = "unknown field" if code == UNKNOWN_FIELD else first["msg"].removeprefix("Value error, ")
    return Problem(said, _path(loc), code)


def request_error(error: ValidationError, names: Mapping[str, str] | None = None) -> RequestError:
    """Of what a caller asked for."""
    problem = problem_of(error, names)
    return RequestError(str(problem), code=problem.code, param=problem.param)


def rename(error: PenstockError, names: Mapping[str, str]) -> None:
    """Name the field at fault as the caller wrote it; `names` tells what it calls our fields, where it differs."""
    ours = re.split(r"[.\[]", error.param or "", maxsplit=1)[0]
    theirs = names.get(ours)
    if theirs is None or error.param is None:
        return
    param = theirs + error.param.removeprefix(ours)
    if error.message.startswith(f"{error.param}:"):
        error.message = param + error.message.removeprefix(error.param)
    error.param = param


def config_error(error: ValidationError) -> ConfigError:
    """Of settings."""
    problem = problem_of(error)
    return ConfigError(str(problem), param=problem.param)


def _path(loc: Sequence[str | int]) -> str | None:
    path = ""
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path[:MAX_NAME_CHARS] or None
