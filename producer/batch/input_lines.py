"""Reading of a batch's input file. Every line is checked before any job is submitted."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from penstock.contract.errors import RequestError

MAX_CUSTOM_ID_CHARS = 256
MAX_LINE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class InputLine:
    """One request of an input file."""

    custom_id: str
    """The caller's name for the request, unique in its file. The result has the same custom_id."""
    fields: dict[str, Any]
    """The line's JSON object. Its request is not checked yet."""


@dataclass(frozen=True, slots=True)
class InputSummary:
    """The number of lines in a checked input file and the digest of their bytes."""

    num_lines: int
    digest: bytes


def survey_of(path: Path) -> InputSummary:
    """Read and check an input file.

    Raises RequestError that names the first line that is not a JSON object with a valid and unique custom_id.
    """
    digest = hashlib.blake2b(digest_size=16)
    first_seen: dict[str, int] = {}
    for number, raw in _raw_lines(path):
        digest.update(raw)
        custom_id = _parse(number, raw).custom_id
        if custom_id in first_seen:
            raise _bad(number, f"custom_id {custom_id!r} is already used in line {first_seen[custom_id]}")
        first_seen[custom_id] = number
    if not first_seen:
        raise RequestError("the input contains no requests", param="input")
    return InputSummary(len(first_seen), digest.digest())


def lines_of(path: Path) -> Iterator[InputLine]:
    """Yield the lines of a file that `survey_of` has checked."""
    for number, raw in _raw_lines(path):
        yield _parse(number, raw)


def _raw_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as file:
        number = 0
        while raw := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(raw) > MAX_LINE_BYTES:
                raise _bad(number, f"longer than {MAX_LINE_BYTES} bytes")
            if not raw.isspace():
                yield number, raw


def _parse(number: int, raw: bytes) -> InputLine:
    try:
        fields = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise _bad(number, f"not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise _bad(number, "must be a JSON object")
    custom_id = fields.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID_CHARS:
        raise _bad(number, f"custom_id must be a string of 1 to {MAX_CUSTOM_ID_CHARS} characters")
    return InputLine(custom_id, fields)


def _bad(number: int, problem: str) -> RequestError:
    return RequestError(f"line {number}: {problem}", param="input")
