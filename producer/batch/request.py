"""The input file of a batch: its lines, and the request of each line.

Every line is checked for its `custom_id` before any job is submitted, and for its fields when it is submitted. A file
may be compressed with gzip or Zstandard, and may begin with a byte order mark; its content says so, not its name.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import shutil
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypeVar, cast

from pydantic import Field, ValidationError
from pydantic_core import from_json, to_json

from penstock.contract.errors import ConfigError, RequestError
from penstock.contract.fields import UNKNOWN_FIELD, IgnoredFields, only
from penstock.contract.job import MAX_CUSTOM_ID_CHARS
from penstock.contract.json_text import json_refusal, without_mark
from penstock.contract.problems import MAX_NAME_CHARS, rename, request_error
from penstock.producer.batch.rows import NAMES_OF_RESPONSES, EmbeddingRow, MessageRow, QueuedRow, ResponseRow
from penstock.producer.openai.bodies import ChatBody, CompletionBody, GenerationBody
from penstock.producer.parsed_body import ParsedBody, parsed_body
from penstock.queue.files.batch import MESSAGES_ENDPOINT

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"
EMBEDDINGS_URL = "/v1/embeddings"
RESPONSES_URL = "/v1/responses"

MAX_LINE_BYTES = 16 << 20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_GZIP, _ZSTANDARD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
"""How compressed files begin."""
_PACKED_BYTES = 16 << 10
"""Bytes that are decompressed at once."""
_LINE_FIELDS = frozenset({"custom_id", "method", "url", "body"})

AnyRow = TypeVar("AnyRow", bound=QueuedRow)


class _RowFields(QueuedRow, GenerationBody):
    """Fields of a row that generates text."""

    model: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    stream_options: Annotated[Any, only(None)] = None
    service_tier: Annotated[Any, only(None, "auto", "default", "flex")] = None


class _ChatRow(_RowFields, ChatBody):
    pass


class _CompletionRow(_RowFields, CompletionBody):
    pass


ROWS: dict[str, type[_ChatRow | _CompletionRow | EmbeddingRow | ResponseRow]] = {
    CHAT_URL: _ChatRow,
    COMPLETIONS_URL: _CompletionRow,
    EMBEDDINGS_URL: EmbeddingRow,
    RESPONSES_URL: ResponseRow,
}
"""The schema of a row's body by its url."""


def request_of_line(fields: Mapping[str, Any]) -> ParsedBody:
    """Return the request of a line in a batch file. Raises RequestError for an invalid line."""
    _refuse_unknown(fields, _LINE_FIELDS)
    if fields.get("method", "POST") != "POST":
        raise RequestError("method must be POST", param="method")
    url, body = fields.get("url"), fields.get("body")
    if not isinstance(url, str) or url not in ROWS:
        raise RequestError(f"url must be one of {', '.join(ROWS)}", param="url")
    if not isinstance(body, dict):
        raise RequestError("body must be an object", param="body")
    return request_of(url, body)


def request_of(url: str, body: Mapping[str, Any]) -> ParsedBody:
    """Return the request of an OpenAI body, whose options name its url. Raises RequestError for an invalid body."""
    row = _validated(ROWS[url], body)
    if isinstance(row, ResponseRow):
        return _response_of(row)
    parsed = parsed_body(row)
    if parsed.task is None and len(parsed.prompts) != 1:
        raise RequestError("a row must have exactly one prompt", param=parsed.names["prompt"])
    return replace(parsed, options={**parsed.options, "url": url})


def message_request_of(body: Mapping[str, Any], *, ignores_unknown: bool = False) -> ParsedBody:
    """Return the request of Anthropic's body. Raises RequestError for an invalid body.

    With `ignores_unknown`, unknown fields of the body itself are dropped instead of refused.
    """
    parsed = parsed_body(_validated(MessageRow, body, IgnoredFields(MessageRow) if ignores_unknown else None))
    return replace(parsed, options={**parsed.options, "url": MESSAGES_ENDPOINT})


def _validated(schema: type[AnyRow], body: Mapping[str, Any], context: IgnoredFields | None = None) -> AnyRow:
    try:
        # Validate as JSON: in strict mode, pydantic then still accepts a list for a tuple and an object for a record.
        return schema.model_validate_json(to_json(body, inf_nan_mode="constants"), context=context)
    except ValidationError as error:
        raise request_error(error) from None


def _response_of(row: ResponseRow) -> ParsedBody:
    try:
        chat = request_of(CHAT_URL, row.chat_body())
    except RequestError as error:
        rename(error, NAMES_OF_RESPONSES)
        raise
    return replace(chat, names=NAMES_OF_RESPONSES, options={"url": RESPONSES_URL, "echo": row.echo()})


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
    number: int
    """The number of the line in its file, from 1."""


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


def plain_copy(path: Path, target: Path) -> Path:
    """Return `path`, or `target` with its decompressed content. Raises RequestError if it is damaged."""
    with path.open("rb") as file:
        if not file.read(len(_ZSTANDARD)).startswith((_GZIP, _ZSTANDARD)):
            return path
    with _plain(path) as source, target.open("wb") as copy:
        shutil.copyfileobj(source, copy)
    return target


def _raw_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with _plain(path) as file:
        number = 0
        while raw := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if number == 1:
                raw = raw.removeprefix(_BYTE_ORDER_MARK)
            if len(raw) > MAX_LINE_BYTES:
                raise _bad(number, f"longer than {MAX_LINE_BYTES} bytes")
            if raw and not raw.isspace():
                yield number, raw


@contextmanager
def _plain(path: Path) -> Iterator[BinaryIO]:
    """Open a file and decompress it. Raises RequestError if it is damaged."""
    with path.open("rb") as file:
        head = file.read(len(_ZSTANDARD))
        file.seek(0)
        if head == _ZSTANDARD:
            with _zstandard_reader(file) as reader:
                yield reader
        elif head.startswith(_GZIP):
            try:
                with gzip.open(file) as reader:
                    yield cast(BinaryIO, reader)
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                raise RequestError(f"the input is damaged: {error}", param="input") from error
        else:
            yield file


@contextmanager
def _zstandard_reader(file: BinaryIO) -> Iterator[BinaryIO]:
    try:
        import zstandard
    except ModuleNotFoundError as error:
        message = "the input is compressed with Zstandard: pip install 'penstock-llm[batch]'"
        raise ConfigError(message, param="input") from error
    decompress = zstandard.ZstdDecompressor().decompressobj
    try:
        yield io.BufferedReader(_FrameReader(file, decompress), 1 << 16)
    except zstandard.ZstdError as error:
        raise RequestError(f"the input is damaged: {error}", param="input") from error


class _FrameReader(io.RawIOBase):
    """Reads the frames of a Zstandard file. The library's own reader takes a cut file for a shorter one."""

    def __init__(self, file: BinaryIO, decompress: Callable[[], Any]) -> None:
        self._file = file
        self._new_frame = decompress
        self._frame = decompress()
        self._held = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._held:
            packed = self._frame.unused_data or self._file.read(_PACKED_BYTES)
            if self._frame.eof:
                if not packed:
                    return 0
                self._frame = self._new_frame()
            elif not packed:
                raise RequestError("the input is damaged: its end is missing", param="input")
            self._held = memoryview(self._frame.decompress(packed))
        part, self._held = self._held[: len(buffer)], self._held[len(buffer) :]
        buffer[: len(part)] = part
        return len(part)


def _parse(number: int, raw: bytes) -> InputLine:
    try:
        fields = from_json(without_mark(raw) if number == 1 else raw, allow_inf_nan=False)
    except RequestError as error:
        raise _bad(number, error.message) from None
    except ValueError as error:
        raise _bad(number, json_refusal(raw, error, "not JSON").message) from error
    if not isinstance(fields, dict):
        raise _bad(number, "must be a JSON object")
    custom_id = fields.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID_CHARS:
        raise _bad(number, f"custom_id must be a string of 1 to {MAX_CUSTOM_ID_CHARS} characters")
    return InputLine(custom_id, fields, number)


def _bad(number: int, problem: str) -> RequestError:
    return RequestError(f"line {number}: {problem}", param="input")
