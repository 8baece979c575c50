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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, BinaryIO, cast

from pydantic import Field, ValidationError
from pydantic_core import from_json, to_json

from penstock.contract.channel import ChannelOption
from penstock.contract.errors import ConfigError, RequestError
from penstock.contract.fields import UNKNOWN_FIELD, IgnoredFields, only
from penstock.contract.job import MAX_CUSTOM_ID_CHARS, NO_SAMPLING, SamplingParams
from penstock.contract.json_text import json_refusal, without_mark
from penstock.contract.problems import MAX_NAME_CHARS, rename, request_error
from penstock.contract.tasks import Embed
from penstock.contract.tools import NO_TOOLS, ToolUse
from penstock.producer.batch.rows import NAMES_OF_RESPONSES, EmbeddingRow, MessageRow, QueuedRow, ResponseRow
from penstock.producer.openai.bodies import ChatBody, CompletionBody, GenerationBody
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

Prompt = str | list[int] | list[dict[str, Any]]


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


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One checked request. `model` is None if the row uses the batch's model."""

    url: str
    prompt: Prompt
    model: str | None
    params: SamplingParams
    echoes: bool = False
    echoes_alone: bool = False
    template_kwargs: str | None = None
    deadline_s: float | None = None
    ttl_s: float | None = None
    not_before_s: float | None = None
    tags: Sequence[str] = ()
    metadata: Mapping[str, str] | None = None
    channel: ChannelOption = None
    task: Embed | None = None
    """The task of a row of embeddings, whose prompts are `inputs`."""
    inputs: Sequence[str | list[int]] = ()
    as_base64: bool = False
    response_echo: Mapping[str, Any] | None = None
    """The members of a response that repeat its request."""
    tool_use: ToolUse = NO_TOOLS
    """The tools that the assistant may or must call."""
    shows_thinking: bool = False
    """Whether a message has thinking blocks."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Maps penstock's field names to those of the body, where they differ."""


def request_of_line(fields: Mapping[str, Any]) -> BatchRequest:
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


def request_of(url: str, body: Mapping[str, Any]) -> BatchRequest:
    """Return the request of an OpenAI body. Raises RequestError for an invalid body."""
    try:
        # Validate as JSON: in strict mode, pydantic then still accepts a list for a tuple and an object for a record.
        row = ROWS[url].model_validate_json(to_json(body, inf_nan_mode="constants"))
        if isinstance(row, EmbeddingRow):
            return _embeddings_of(row)
        if isinstance(row, ResponseRow):
            return _response_of(row)
    except ValidationError as error:
        raise request_error(error) from None
    try:
        params = row.params()
    except ValidationError as error:
        raise request_error(error, row.names()) from None
    prompts = row.prompts()
    if len(prompts) != 1:
        raise RequestError("a row must have exactly one prompt", param=row.prompt_field)
    return BatchRequest(
        url,
        prompts[0],
        row.model,
        params,
        row.echoes,
        isinstance(row, CompletionBody) and row.echoes_alone,
        row.template_kwargs,
        channel=row.channel,
        tool_use=row.tool_use(),
        names=row.names(),
        **row.queueing(),
    )


def message_request_of(body: Mapping[str, Any], *, ignores_unknown: bool = False) -> BatchRequest:
    """Return the request of Anthropic's body. Raises RequestError for an invalid body.

    With `ignores_unknown`, unknown fields of the body itself are dropped instead of refused.
    """
    context = IgnoredFields(MessageRow) if ignores_unknown else None
    try:
        row = MessageRow.model_validate_json(to_json(body, inf_nan_mode="constants"), context=context)
    except ValidationError as error:
        raise request_error(error) from None
    try:
        params = row.params()
    except ValidationError as error:
        raise request_error(error, row.names()) from None
    return BatchRequest(
        MESSAGES_ENDPOINT,
        row.prompts()[0],
        row.model,
        params,
        template_kwargs=row.template_kwargs,
        channel=row.channel,
        tool_use=row.tool_use(),
        shows_thinking=row.shows_thinking,
        names=row.names(),
        **row.queueing(),
    )


def _embeddings_of(row: EmbeddingRow) -> BatchRequest:
    return BatchRequest(
        EMBEDDINGS_URL,
        row.input[0],
        row.model,
        NO_SAMPLING,
        task=row.task(),
        inputs=row.input,
        as_base64=row.encoding_format == "base64",
        **row.queueing(),
    )


def _response_of(row: ResponseRow) -> BatchRequest:
    try:
        chat = request_of(CHAT_URL, row.chat_body())
    except RequestError as error:
        rename(error, NAMES_OF_RESPONSES)
        raise
    return replace(chat, url=RESPONSES_URL, names=NAMES_OF_RESPONSES, response_echo=row.echo())


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
