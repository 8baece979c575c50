"""The content of a stored file, or of the part that a Range header names, as an answer."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from functools import partial

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from penstock.contract.errors import RequestError
from penstock.producer.files.service import Files
from penstock.queue.files.file_records import StoredFile

Read = Callable[[int, int], AsyncGenerator[bytes, None]]
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")


class RangeError(RequestError):
    """The file has no byte of the range."""

    status = 416
    code = "range_not_satisfiable"


class FileContent(StreamingResponse):
    """A response with the content of a file, which is read as its client takes it.

    An error of the storage cuts it off, so that no client takes a part for the whole.
    """

    def __init__(
        self, name: str, num_bytes: int, request: Request, read: Read, *, media_type: str = "application/octet-stream"
    ) -> None:
        """`read` yields the bytes from a first to before a last one. Raises RangeError."""
        wanted = request.headers.get("range")
        is_part = wanted is not None
        start, end = (0, num_bytes) if wanted is None else range_of(wanted, num_bytes)
        if is_part and start >= end:
            raise RangeError(f"range: the file has {num_bytes} bytes", param="range")
        name = re.sub(r"[^ !#-\[\]-~]", "_", name)
        headers = {
            "Content-Length": str(end - start),
            "Accept-Ranges": "bytes",
            "Content-Disposition": f'attachment; filename="{name}"',
        }
        if is_part:
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{num_bytes}"
        self._content = read(start, end)
        status = 206 if is_part else 200
        super().__init__(self._pieces(), status, headers, media_type=media_type)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the content. If its beginning cannot be read, the answer is that error."""
        self._first = await anext(self._content, b"")
        await super().__call__(scope, receive, send)

    async def _pieces(self) -> AsyncIterator[bytes]:
        async with aclosing(self._content) as content:
            yield self._first
            async for piece in content:
                yield piece


async def content_of(
    files: Files, request: Request, file: StoredFile, media_type: str = "application/octet-stream"
) -> FileContent:
    """Return the answer with a file's content. Raises UnavailableError if it is not stored here, and RangeError."""
    read = partial(files.content, file)
    content = FileContent(file.name, file.num_bytes, request, read, media_type=media_type)
    await files.storage()
    return content


def range_of(text: str, num_bytes: int) -> tuple[int, int]:
    """Return the first byte of a range, and the byte behind its last one. Raises RequestError if it is malformed.

    Of a range that the file lacks, the second number is not above the first.
    """
    found = _RANGE.fullmatch(text.strip())
    if found is None or (not found[1] and not found[2]):
        raise RequestError("range must have the form bytes=FIRST-LAST, with one range", param="range")
    if not found[1]:
        return max(0, num_bytes - int(found[2])), num_bytes
    last = int(found[2]) if found[2] else num_bytes - 1
    return int(found[1]), min(last + 1, num_bytes)
