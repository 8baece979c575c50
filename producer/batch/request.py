"""The input file of a batch: its lines, and the request of each line.

Every line is checked for its `custom_id` before any job is submitted, and for its fields when it is submitted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, field_validator
from pydantic_core import PydanticCustomError, from_json, to_json

from penstock.contract.errors import RequestError
from penstock.contract.job import MAX_DEADLINE_S, MAX_TAGS, SamplingParams, Tag
from penstock.contract.named import UNKNOWN_FIELD
from penstock.contract.problems import MAX_NAME_CHARS, request_error
from penstock.producer.openai.bodies import ChatBody, CompletionBody
from penstock.producer.openai.fields import only
from penstock.producer.openai.generation_body import GenerationBody

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"

MAX_CUSTOM_ID_CHARS = 256
MAX_LINE_BYTES = 16 << 20
_LINE_FIELDS = frozenset({"custom_id", "method", "url", "body"})

Prompt = str | list[int] | list[dict[str, Any]]


class _RowFields(GenerationBody):
    """Fields of a row beside OpenAI's body. A row cannot stream and cannot choose its priority class."""

    model: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    stream: Annotated[Any, only(None, False)] = None
    stream_options: Annotated[Any, only(None)] = None
    tags: Annotated[list[Tag] | None, Field(max_length=MAX_TAGS)] = None
    service_tier: Annotated[Any, only(None, "auto", "default", "flex")] = None
    # They count from the submission of the row.
    deadline_s: float | None = None
    ttl_s: float | None = None

    @field_validator("deadline_s", "ttl_s")
    @classmethod
    def _is_duration(cls, value: float | None) -> float | None:
        if value is not None and not 0 < value <= MAX_DEADLINE_S:
            raise PydanticCustomError(
                "duration", "must be above 0 and at most {limit} seconds", {"limit": MAX_DEADLINE_S}
            )
        return value


class _ChatRow(_RowFields, ChatBody):
    tools: Annotated[Any, only(None, [])] = None
    tool_choice: Annotated[Any, only(None, "none", "auto")] = None


class _CompletionRow(_RowFields, CompletionBody):
    pass


ROWS: dict[str, type[_ChatRow | _CompletionRow]] = {CHAT_URL: _ChatRow, COMPLETIONS_URL: _CompletionRow}
"""The schema of a row's body by its url."""


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One checked request. `model` is None if the row uses the batch's model."""

    url: str
    prompt: Prompt
    model: str | None
    params: SamplingParams
    echoes: bool = False
    template_kwargs: str | None = None
    deadline_s: float | None = None
    ttl_s: float | None = None
    tags: Sequence[str] = ()
    metadata: Mapping[str, str] | None = None


def request_of_line(fields: Mapping[str, Any]) -> BatchRequest:
    """Return the request of a line in a batch file. Raises RequestError for an invalid line."""
    _refuse_unknown(fields, _LINE_FIELDS)
    if fields.get("method", "POST") != "POST":
        raise RequestError("method must be POST", param="method")
    url, body = fields.get("url"), fields.get("body")
    if not isinstance(url, str) or url not in ROWS:
        raise RequestError(f"url must be {CHAT_URL} or {COMPLETIONS_URL}", param="url")
    if not isinstance(body, dict):
        raise RequestError("body must be an object", param="body")
    return request_of(url, body)


def request_of(url: str, body: Mapping[str, Any]) -> BatchRequest:
    """Return the request of an OpenAI body. Raises RequestError for an invalid body."""
    try:
        # Validate as JSON: in strict mode, pydantic then still accepts a list for a tuple and an object for a record.
        row = ROWS[url].model_validate_json(to_json(body, inf_nan_mode="constants"))
        params = row.params()
    except ValidationError as error:
        raise request_error(error) from None
    prompts = row.prompts()
    if len(prompts) != 1:
        raise RequestError("a row must have exactly one prompt", param=row.prompt_field)
    times = row.deadline_s, row.ttl_s
    listed = row.tags or (), row.metadata
    return BatchRequest(url, prompts[0], row.model, params, row.echoes, row.template_kwargs, *times, *listed)


def _refuse_unknown(fields: Mapping[str, Any], known: Collection[str]) -> None:
    for name in fields:
        if name not in known:
            shown = name[:MAX_NAME_CHARS]
            raise RequestError(f"{shown}: unknown field", code=UNKNOWN_FIELD, param=shown)


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
