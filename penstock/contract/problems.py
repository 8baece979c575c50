"""Translation of pydantic's validation errors into penstock errors that name the first invalid field."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from penstock.contract.errors import ConfigError, PenstockError, RequestError
from penstock.contract.named import UNKNOWN_FIELD

MAX_NAME_CHARS = 128
"""Limit for an echoed field name, since the name may come from an untrusted request."""
_CODES = {"extra_forbidden": UNKNOWN_FIELD, UNKNOWN_FIELD: UNKNOWN_FIELD, "unsupported_value": "unsupported_value"}
"""Error type, of pydantic or `PydanticCustomError` → API error code."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One validation problem; `str()` gives field and message."""

    message: str
    param: str | None = None
    """Path of the field in Python notation, such as `messages[0].role`; None for the record as a whole."""
    code: str | None = None

    def __str__(self) -> str:
        return f"{self.param}: {self.message}" if self.param else self.message


def problem_of(error: ValidationError, names: Mapping[str, str] | None = None) -> Problem:
    """Return the first problem of `error`. `names` maps our field names to the caller's, where they differ.

    The problem never shows the input, because the input may be a prompt and the message may be logged.
    """
    first = error.errors(include_url=False, include_input=False)[0]
    loc = list(first["loc"])
    if loc:
        loc[0] = (names or {}).get(str(loc[0]), loc[0])
    unknown = first.get("ctx", {}).get(UNKNOWN_FIELD)
    if unknown is not None:
        loc.append(unknown)
    code = _CODES.get(first["type"])
    message = "unknown field" if code == UNKNOWN_FIELD else first["msg"].removeprefix("Value error, ")
    return Problem(message, _path(loc), code)


def request_error(error: ValidationError, names: Mapping[str, str] | None = None) -> RequestError:
    """Return the error for an invalid request; `names` as in `problem_of`."""
    problem = problem_of(error, names)
    return RequestError(str(problem), code=problem.code, param=problem.param)


def rename(error: PenstockError, names: Mapping[str, str]) -> None:
    """Replace our field name in `error` by the caller's; `names` maps ours to the caller's, where they differ."""
    own_name = re.split(r"[.\[]", error.param or "", maxsplit=1)[0]
    new_name = names.get(own_name)
    if new_name is None or error.param is None:
        return
    param = new_name + error.param.removeprefix(own_name)
    if error.message.startswith(f"{error.param}:"):
        error.message = param + error.message.removeprefix(error.param)
    error.param = param


def config_error(error: ValidationError) -> ConfigError:
    """Return the error for invalid settings."""
    problem = problem_of(error)
    return ConfigError(str(problem), param=problem.param)


def _path(loc: Sequence[str | int]) -> str | None:
    path = ""
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path[:MAX_NAME_CHARS] or None
