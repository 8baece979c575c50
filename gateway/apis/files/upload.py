"""`POST /v1/files`: a form's file streams to the storage, in memory of a few MiB and at a least rate.

The multipart form is read as it arrives: its file goes on in pieces, and its fields are small.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from penstock.contract.errors import RequestError, TooLargeError
from penstock.contract.tenant import ApiKey
from penstock.gateway.request.reading import caller_of, idempotency_key_of
from penstock.gateway.request.uploads import UploadSlots, UploadTime, timed_upload
from penstock.gateway.settings import GatewaySettings
from penstock.producer.files.service import Files, Upload
from penstock.queue.files.file_records import MAX_LIFE_S, MAX_NAME_CHARS, PURPOSES
from penstock.runtime.event_loop import LoopYielder

# The form.

MAX_FIELDS = 16
MAX_FIELD_BYTES = 4096
MAX_HEAD_BYTES = 8192
"""Bytes of the headers of a part."""
OVERHEAD_BYTES = MAX_FIELDS * (MAX_FIELD_BYTES + MAX_HEAD_BYTES)
"""Bytes that a form may have beside its file."""
_SLICE_BYTES, _SLOW_SLICE_BYTES = 16 << 10, 4 << 10
"""Bytes that are parsed before the event loop may serve other tasks. Each carriage return may begin a boundary, which
takes the parser 2 µs a byte."""
_FEW_RETURNS = 64


@dataclass(frozen=True, slots=True)
class FileBegins:
    """The file's content follows."""

    param: str
    name: str


@dataclass(frozen=True, slots=True)
class FormField:
    """A whole field."""

    name: str
    value: str


@dataclass(slots=True)
class _Part:
    name: str = ""
    filename: str | None = None
    value: bytearray = field(default_factory=bytearray)


class FormReader:
    """Reads one form. `events` yields fields, the beginning of the file, and the bytes of its content."""

    def __init__(self, request: Request, yielder: LoopYielder) -> None:
        """Raises RequestError if the request holds no form."""
        kind, options = parse_options_header(request.headers.get("content-type", ""))
        if kind != b"multipart/form-data" or not options.get(b"boundary"):
            raise RequestError(
                "Content-Type must be multipart/form-data with a boundary", code="unsupported_media_type"
            )
        self._request = request
        self._yielder = yielder
        self._found: list[FileBegins | FormField | bytes] = []
        self._part = _Part()
        self._head = bytearray()
        self._header = bytearray()
        self._num_parts = 0
        self._has_file = False
        self._is_whole = False
        self._parser = MultipartParser(
            options[b"boundary"],
            {
                "on_part_begin": self._begin_part,
                "on_header_field": self._on_header_name,
                "on_header_value": self._on_header_value,
                "on_header_end": self._end_header,
                "on_headers_finished": self._end_head,
                "on_part_data": self._on_data,
                "on_part_end": self._end_part,
                "on_end": self._end,
            },
        )

    async def events(self) -> AsyncIterator[FileBegins | FormField | bytes]:
        """Yield what arrives. Raises RequestError for a malformed form, and ClientDisconnect."""
        async for chunk in self._request.stream():
            num_bytes = _SLICE_BYTES if chunk.count(b"\r") <= _FEW_RETURNS else _SLOW_SLICE_BYTES
            for at in range(0, len(chunk), num_bytes):
                try:
                    self._parser.write(chunk[at : at + num_bytes])
                except MultipartParseError as error:
                    raise RequestError(f"the form is malformed: {error}", code="malformed_form") from None
                found, self._found = self._found, []
                for event in found:
                    yield event
                await self._yielder.wait()
        if not self._is_whole:
            raise RequestError("the form ends early", code="body_incomplete")

    def _begin_part(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_FIELDS:
            raise RequestError(f"the form has more than {MAX_FIELDS} parts", code="malformed_form")
        self._part, self._header = _Part(), bytearray()
        self._head = bytearray()

    def _on_header_name(self, data: bytes, start: int, end: int) -> None:
        self._add_to_header(data[start:end])

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        if b":" not in self._header:
            self._header += b":"
        self._add_to_header(data[start:end])

    def _add_to_header(self, data: bytes) -> None:
        self._header += data
        if len(self._header) + len(self._head) > MAX_HEAD_BYTES:
            message = f"the headers of a part have more than {MAX_HEAD_BYTES} bytes"
            raise RequestError(message, code="malformed_form")

    def _end_header(self) -> None:
        name, _, value = self._header.partition(b":")
        self._head += self._header
        self._header = bytearray()
        if name.lower() == b"content-disposition":
            _, options = parse_options_header(bytes(value))
            self._part.name = options.get(b"name", b"").decode(errors="replace")[:MAX_NAME_CHARS]
            if b"filename" in options:
                self._part.filename = options[b"filename"].decode(errors="replace")[-MAX_NAME_CHARS:]

    def _end_head(self) -> None:
        if self._part.filename is None:
            return
        if self._has_file:
            raise RequestError("the form has more than one file", param=self._part.name)
        self._has_file = True
        self._found.append(FileBegins(self._part.name, self._part.filename))

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        if self._part.filename is not None:
            self._found.append(data[start:end])
            return
        self._part.value += data[start:end]
        if len(self._part.value) > MAX_FIELD_BYTES:
            name = self._part.name[:64]
            raise RequestError(f"{name} has more than {MAX_FIELD_BYTES} bytes", param=name)

    def _end_part(self) -> None:
        if self._part.filename is None:
            self._found.append(FormField(self._part.name, self._part.value.decode(errors="replace")))

    def _end(self) -> None:
        self._is_whole = True


# The upload.

_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"
_FIELDS = ("purpose", "file", _ANCHOR, _SECONDS)


class Uploads:
    """Receives the files of uploads."""

    def __init__(self, files: Files, settings: GatewaySettings, yielder: LoopYielder) -> None:
        self._files = files
        self._settings = settings
        self._yielder = yielder
        self._slots = UploadSlots(files.settings.max_tenant_uploads)

    async def receive(self, request: Request) -> str:
        """Store the file of a form and return its id. Raises the error of a wrong form, limit or storage."""
        caller, key = caller_of(request), idempotency_key_of(request)
        with self._slots.taken(caller.tenant):
            async with timed_upload(self._files.settings, self._settings.body_timeout_s, "file") as time:
                return await self._receive(request, caller, key, time)

    async def _receive(self, request: Request, caller: ApiKey, key: str | None, time: UploadTime) -> str:
        form, fields = FormReader(request, self._yielder), dict[str, str]()
        file: FileBegins | None = None
        async with self._begun(request, caller.tenant) as upload:
            async for event in form.events():
                if isinstance(event, bytes):
                    time.received(len(event))
                    with time.standing_still():
                        await upload.write(event)
                elif isinstance(event, FileBegins):
                    if event.param != "file":
                        name = event.param[:64]
                        raise RequestError(f"{name}: the form's file must have the name file", param=name)
                    file = event
                else:
                    _add(fields, event)
            purpose, life_ms = self._options_of(fields)
            if file is None:
                raise RequestError("file: the form has no file", param="file")
            with time.standing_still():
                return await upload.save(file.name or "file", purpose, life_ms, idempotency_key=key)

    @asynccontextmanager
    async def _begun(self, request: Request, tenant: str) -> AsyncIterator[Upload]:
        max_bytes = self._files.settings.max_file_bytes
        declared = request.headers.get("content-length", "")
        num_bytes = int(declared) if declared.isdecimal() else max_bytes
        if num_bytes > max_bytes + OVERHEAD_BYTES:
            raise TooLargeError(
                f"the file is larger than {max_bytes} bytes (PENSTOCK_FILES_MAX_FILE_MIB)",
                code="file_too_large",
                param="file",
            )
        async with await self._files.begin(tenant, min(num_bytes, max_bytes)) as upload:
            yield upload

    def _options_of(self, fields: dict[str, str]) -> tuple[str, int]:
        """Return the purpose of a file, and its life in milliseconds."""
        purpose = fields.get("purpose", "")
        if purpose not in PURPOSES:
            raise RequestError(f"purpose must be one of {', '.join(PURPOSES)}", param="purpose")
        anchor, seconds = fields.get(_ANCHOR), fields.get(_SECONDS)
        if anchor is None and seconds is None:
            return purpose, self._files.settings.retention_ms
        if anchor != "created_at":
            raise RequestError(f"{_ANCHOR} must be created_at", param=_ANCHOR)
        return purpose, 1000 * checked_life_s(seconds, _SECONDS)


def checked_life_s(seconds: object, param: str) -> int:
    """Return for how many seconds a file is to be kept. Raises RequestError."""
    text = str(seconds)
    if isinstance(seconds, bool) or not (text.isdecimal() and len(text) < 12 and 1 <= int(text) <= MAX_LIFE_S):
        raise RequestError(f"{param} must be a whole number from 1 to {MAX_LIFE_S}", param=param)
    return int(text)


def _add(fields: dict[str, str], field: FormField) -> None:
    if field.name not in _FIELDS or field.name == "file":
        name = field.name[:64]
        raise RequestError(f"{name}: unknown field; known: {', '.join(_FIELDS)}", code="unknown_field", param=name)
    if field.name in fields:
        raise RequestError(f"{field.name} is given twice", param=field.name)
    fields[field.name] = field.value
