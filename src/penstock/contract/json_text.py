"""The bytes of JSON from callers: their encoding, and which field a lone surrogate is in.

JSON is UTF-8. Some Windows tools write a byte order mark before it, which is dropped, or write UTF-16.
"""

from __future__ import annotations

import codecs
import json
import re
from typing import Any

from pydantic_core import from_json

from penstock.contract.errors import RequestError

_MAX_PATH_CHARS = 128
_OTHER_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
"""Byte order marks, the longer ones first: that of UTF-32 begins with that of UTF-16."""
_ZEROS = {"UTF-32": (b"\0\0\0", slice(1, 4), slice(0, 3)), "UTF-16": (b"\0", slice(1, 2), slice(0, 1))}
"""The zeros after or before the first character of a JSON text, which is ASCII, and where they are."""
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")


def without_mark(raw: bytes) -> bytes:
    """Return the bytes without a byte order mark. Raises RequestError for UTF-16 and UTF-32."""
    if raw[:1] not in (b"\xef", b"\xff", b"\xfe", b"\0") and raw[1:2] != b"\0":
        return raw
    for mark, encoding in _OTHER_MARKS.items():
        if raw.startswith(mark):
            raise _other_encoding(encoding)
    for encoding, (zeros, after, before) in _ZEROS.items():
        if zeros in (raw[after], raw[before]):
            raise _other_encoding(encoding)
    return raw.removeprefix(codecs.BOM_UTF8)


def _other_encoding(encoding: str) -> RequestError:
    return RequestError(f"the JSON is encoded as {encoding}; send UTF-8", code="unsupported_media_type")


def json_refusal(raw: bytes, error: object, what: str = "the body is not valid JSON") -> RequestError:
    """Return the error for bytes that are not valid JSON. It names the field of a lone surrogate."""
    if _SURROGATE.search(raw) is not None and (path := _place_of_surrogate(raw)) is not None:
        rule = "must be valid Unicode, without lone surrogates"
        return RequestError(f"{path}: {rule}" if path else f"the JSON {rule}", param=path or None)
    return RequestError(f"{what}: {str(error)[:200]}")


def json_or_empty(raw: bytes) -> bytes:
    """Return the bytes. Raises RequestError if they are neither empty nor JSON."""
    try:
        if raw:
            from_json(raw)
    except ValueError as error:
        raise json_refusal(raw, error) from None
    return raw


def _place_of_surrogate(raw: bytes) -> str | None:
    """Return the path of the first text with a lone surrogate; None if there is none or the rest is no JSON."""
    try:
        waiting: list[tuple[str, Any]] = [("", json.loads(raw.decode("utf-8", "surrogatepass")))]
    except (ValueError, RecursionError):
        return None
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, str) and not _is_valid(value):
            return path[:_MAX_PATH_CHARS]
        if isinstance(value, dict):
            if not all(map(_is_valid, value)):
                return path[:_MAX_PATH_CHARS]
            members = [(f"{path}.{name}" if path else name, one) for name, one in value.items()]
            waiting += reversed(members)
        elif isinstance(value, list):
            waiting += reversed([(f"{path}[{index}]", one) for index, one in enumerate(value)])
    return None


def _is_valid(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)
