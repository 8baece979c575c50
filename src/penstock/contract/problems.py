"""Translation of pydantic's validation errors into penstock errors that name every invalid field."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, get_args

from pydantic import ValidationError
from pydantic_core.core_schema import ErrorType

from penstock.contract.errors import ConfigError, PenstockError, RequestError
from penstock.contract.fields import NEAREST_FIELD, UNKNOWN_FIELD, WRONG_MEMBER

MAX_NAME_CHARS = 128
"""Limit for an echoed field name, since the name may come from an untrusted request."""
MAX_PROBLEMS = 8
"""Fields that one error names."""


_FOLLOWS = "default_factory_not_called"
"""The error type of a field whose default depends on a field that is wrong."""
_CODES = {"extra_forbidden": UNKNOWN_FIELD, UNKNOWN_FIELD: UNKNOWN_FIELD, "unsupported_value": "unsupported_value"}
"""Error type, of pydantic or `PydanticCustomError` → API error code."""


AnyError = TypeVar("AnyError", bound=PenstockError)
_LIBRARY_TYPES = frozenset(get_args(ErrorType))


_TEXTS = {
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "bytes_type": "must be bytes",
    "dict_type": "must be an object",
    "dataclass_type": "must be an object",
    "enum": "must be {expected}",
    "finite_number": "must be a finite number",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "int_from_float": "must be an integer",
    "int_parsing": "must be an integer",
    "int_parsing_size": "must be an integer of 64 bits",
    "int_type": "must be an integer",
    "is_instance_of": "has the wrong type",
    "json_invalid": "the body is not valid JSON: {error}",
    "json_type": "must be JSON text",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "list_type": "must be a list",
    "literal_error": "must be {expected}",
    "mapping_type": "must be an object",
    "missing": "is required",
    "model_attributes_type": "must be an object",
    "model_type": "must be an object",
    "none_required": "must be null",
    "string_pattern_mismatch": "must match the pattern {pattern}",
    "string_too_long": "must have at most {max_length} characters",
    "string_too_short": "must have at least {min_length} characters",
    "string_type": "must be a string",
    "string_unicode": "must be valid Unicode, without lone surrogates",
    "too_long": "must have at most {max_length} items",
    "too_short": "must have at least {min_length} items",
    "tuple_type": "must be a list",
}
"""Error type of pydantic → text. The names in braces are those of the error's context."""


_OURS = "Value error, "
"""pydantic puts this before the text of a ValueError that one of our validators raises."""


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
    """Return the first problem of `error`, as `problems_of` does."""
    return problems_of(error, names)[0]


def problems_of(error: ValidationError, names: Mapping[str, str] | None = None) -> list[Problem]:
    """Return the first problem of each field, and of each item of a list; at most MAX_PROBLEMS.

    `names` maps our field names to the caller's, where they differ. A problem never shows the input, because the input
    may be a prompt and the message may be logged.
    """
    found: dict[tuple[Any, ...], Problem] = {}
    for one in error.errors(include_url=False, include_input=False):
        if found and one["type"] == _FOLLOWS:
            continue
        if one["type"] == "too_short" and any(loc[: len(one["loc"])] == one["loc"] for loc in found):
            # Of a list whose items are wrong, pydantic counts the right ones.
            continue
        # A field of several types has a problem of each; the first one says enough.
        item = next((at for at, part in enumerate(one["loc"]) if isinstance(part, int)), 0)
        key = one["loc"][: item + 1] or (one.get("ctx", {}).get(UNKNOWN_FIELD),)
        if key not in found:
            found[key] = _problem(one, names)
        if len(found) == MAX_PROBLEMS:
            break
    return list(found.values())


def _problem(first: Mapping[str, Any], names: Mapping[str, str] | None) -> Problem:
    loc = list(first["loc"])
    if loc:
        loc[0] = (names or {}).get(str(loc[0]), loc[0])
    context = first.get("ctx", {})
    if not loc and (member := context.get(WRONG_MEMBER)) is not None:
        loc = [(names or {}).get(member, member)]
    else:
        loc += [context[name] for name in (UNKNOWN_FIELD, WRONG_MEMBER) if name in context]
    code = _CODES.get(first["type"])
    if code != UNKNOWN_FIELD:
        message = _text_of(first)
    elif (nearest := context.get(NEAREST_FIELD)) is None:
        message = "unknown field"
    else:
        message = f"unknown field; the most similar known name is {nearest}"
    return Problem(message, _path(loc), code)


def _text_of(error: Mapping[str, Any]) -> str:
    """Return the text for one error of a pydantic ValidationError."""
    kind, message, context = error["type"], str(error["msg"]), error.get("ctx", {})
    if kind == "value_error":
        return message.removeprefix(_OURS)
    if kind not in _LIBRARY_TYPES:
        # One of our validators raised a PydanticCustomError with its own text.
        return message
    return _TEXTS.get(kind, "is not a valid value").format_map(context)


def request_error(error: ValidationError, names: Mapping[str, str] | None = None) -> RequestError:
    """Return the error for an invalid request; `names` as in `problem_of`."""
    return _joined(RequestError, problems_of(error, names))


def _joined(kind: type[AnyError], problems: Sequence[Problem]) -> AnyError:
    error = kind("; ".join(map(str, problems)), code=problems[0].code, param=problems[0].param)
    error.also = tuple(one.param for one in problems[1:] if one.param)
    return error


def joined(errors: Sequence[AnyError]) -> AnyError:
    """Return one error that says what several say. Its class and its code are those of the first."""
    first = errors[0]
    if len(errors) == 1:
        return first
    found = _joined(type(first), [Problem(one.message, None, one.code) for one in errors])
    names = [name for one in errors for name in (one.param, *one.also) if name]
    found.param, found.also = next(iter(names), None), names[1:]
    return found


def rename(error: PenstockError, names: Mapping[str, str]) -> None:
    """Replace our field name in `error` by the caller's; `names` maps ours to the caller's, where they differ."""
    if error.param is None:
        return
    error.param, *error.also = [_renamed(error, param, names) for param in (error.param, *error.also)]


def _renamed(error: PenstockError, param: str, names: Mapping[str, str]) -> str:
    own_name = re.split(r"[.\[]", param, maxsplit=1)[0]
    if (new_name := names.get(own_name)) is None:
        return param
    new = new_name + param.removeprefix(own_name)
    error.message = re.sub(rf"(^|; ){re.escape(param)}(?=:)", lambda match: f"{match[1]}{new}", error.message, count=1)
    return new


def put_under(error: PenstockError, member: str) -> None:
    """Let an error of the object in this member name its field by the whole path."""
    has_name = error.param is not None and error.message.startswith((f"{error.param}:", f"{error.param} "))
    error.message = f"{member}.{error.message}" if has_name else f"{member}: {error.message}"
    error.param = member if error.param is None else f"{member}.{error.param}"
    for name in error.also:
        error.message = error.message.replace(f"; {name}:", f"; {member}.{name}:", 1)
    error.also = [f"{member}.{name}" for name in error.also]


def config_error(error: ValidationError) -> ConfigError:
    """Return the error for invalid settings."""
    return _joined(ConfigError, problems_of(error))


def _path(loc: Sequence[str | int]) -> str | None:
    path = ""
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path[:MAX_NAME_CHARS] or None
