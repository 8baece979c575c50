"""What pydantic finds wrong in a body, as one error that names the field as the caller wrote it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import ValidationError

from penstock.contract.errors import PenstockError, RequestError

MAX_NAME_CHARS = 128
"""A field's name comes from the request, so what is echoed of it is bounded."""


def request_error(error: ValidationError) -> RequestError:
    """The first thing that pydantic found wrong in a body, named as the caller wrote it."""
    first = error.errors(include_url=False, include_input=False)[0]
    unknown = first.get("ctx", {}).get("unknown_field")
    loc = first["loc"] if unknown is None else (*first["loc"], unknown)
    param = _path(loc)
    said = first["msg"].removeprefix("Value error, ")
    message = f"{param}: {said}" if param else said
    code = first["type"] if first["type"] in ("unknown_field", "unsupported_value") else None
    return RequestError(message, code=code, param=param)


def rename(error: PenstockError, names: Mapping[str, str]) -> None:
    """Name the field at fault as the caller wrote it; `names` tells what it calls our fields, where it differs."""
    ours = (error.param or "").partition(".")[0]
    theirs = names.get(ours)
    if theirs is None or error.param is None:
        return
    param = theirs + error.param.removeprefix(ours)
    if error.message.startswith(f"{error.param}:"):
        error.message = param + error.message.removeprefix(error.param)
    error.param = param


def _path(loc: Sequence[str | int]) -> str | None:
    path = ""
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path[:MAX_NAME_CHARS] or None
