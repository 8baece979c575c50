"""The routes of `/v1/files`. A caller sees only the files of its own tenant; others do not exist for it."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from penstock.contract.errors import RequestError
from penstock.gateway.apis.files.upload import Uploads
from penstock.gateway.errors import soon
from penstock.gateway.http.dialect import HttpDialect, Services
from penstock.gateway.request.reading import caller_of
from penstock.producer.files.service import Files
from penstock.queue.files.file_records import OF_MESSAGE_BATCHES, StoredFile, no_file

MAX_LIMIT = 10_000
DEFAULT_LIMIT = 1000
LOST = "the storage has lost the content of this file"
_READ_AT_ONCE = 500
Read = Callable[[int, int], AsyncGenerator[bytes, None]]
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")
_MULTIPART = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string"},
                        "expires_after[anchor]": {"const": "created_at"},
                        "expires_after[seconds]": {"type": "integer"},
                    },
                }
            }
        },
    }
}


class RangeError(RequestError):
    """The file has no byte of the range."""

    status = 416
    code = "range_not_satisfiable"


def file_object(file: StoredFile) -> dict[str, Any]:
    """Return OpenAI's object of a file."""
    return {
        "id": file.file_id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": file.created_ms // 1000,
        "expires_at": None if file.expires_ms is None else file.expires_ms // 1000,
        "filename": file.name,
        "purpose": file.purpose,
        "status": "error" if file.is_lost else "processed",
        "status_details": LOST if file.is_lost else None,
    }


class FileRoutes:
    """The routes of stored files."""

    def __init__(self, files: Files, uploads: Uploads) -> None:
        self._files = files
        self._uploads = uploads
        self.router = APIRouter()
        path = "/v1/files"
        self.router.add_api_route(path, self.upload_file, methods=["POST"], openapi_extra=_MULTIPART)
        self.router.add_api_route(path, self.list_files)
        self.router.add_api_route(f"{path}/{{file_id}}", self.retrieve_file)
        self.router.add_api_route(f"{path}/{{file_id}}/content", self.retrieve_file_content)
        self.router.add_api_route(f"{path}/{{file_id}}", self.delete_file, methods=["DELETE"])

    async def upload_file(self, request: Request) -> dict[str, Any]:
        """Store the file of a multipart form.

        A repeated request with the same Idempotency-Key and the same file gets the same file.
        """
        file_id = await self._uploads.receive(request)
        return file_object(await self._files.find(file_id, caller_of(request).tenant))

    async def list_files(self, request: Request) -> dict[str, Any]:
        """List the caller's files, newest first.

        `?limit=`, `?after=` (the id of a file), `?order=` (`asc` or `desc`) and `?purpose=`.
        """
        query, tenant = query_of(request, "limit", "after", "order", "purpose"), caller_of(request).tenant
        limit = limit_of(query, DEFAULT_LIMIT, MAX_LIMIT)
        order, purpose = query.get("order", "desc"), query.get("purpose")
        if order not in ("asc", "desc"):
            raise RequestError("order must be asc or desc", param="order")
        await self._files.storage()
        async with soon():
            ids = await self._files.records.ids(tenant, newest_first=order == "desc")
            left = ids_after(ids, query.get("after"))
            found: list[StoredFile] = []
            while left and len(found) <= limit:
                part, left = left[:_READ_AT_ONCE], left[_READ_AT_ONCE:]
                files = await self._files.records.several(part, tenant)
                found += [file for file in files if _is_shown(file) and purpose in (None, file.purpose)]
        return page_of([file_object(file) for file in found], limit)

    async def retrieve_file(self, request: Request, file_id: str) -> dict[str, Any]:
        """Return a file's name, size and times."""
        return file_object(await self._find(request, file_id))

    async def retrieve_file_content(self, request: Request, file_id: str) -> Response:
        """Return a file's content, or the part of it that a Range header names."""
        file = await self._find(request, file_id)
        return await content_of(self._files, request, file)

    async def delete_file(self, request: Request, file_id: str) -> dict[str, Any]:
        """Delete a file. An open batch's input cannot be deleted."""
        file = await self._find(request, file_id)
        await self._files.delete(file)
        return {"id": file.file_id, "object": "file", "deleted": True}

    async def _find(self, request: Request, file_id: str) -> StoredFile:
        async with soon():
            file = await self._files.find(file_id, caller_of(request).tenant)
        if not _is_shown(file):
            raise no_file(file_id)
        return file


def _is_shown(file: StoredFile) -> bool:
    """Return whether a file is the caller's own. Those of message batches end with these."""
    return file.purpose not in OF_MESSAGE_BATCHES


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


def query_of(request: Request, *known: str) -> Mapping[str, str]:
    """Return the query of a request. Raises RequestError for an unknown parameter."""
    for name in request.query_params:
        if name not in known:
            raise RequestError(f"{name[:64]}: unknown query parameter", code="unknown_field", param=name[:64])
    return request.query_params


def limit_of(query: Mapping[str, str], default: int, most: int) -> int:
    """Return how many objects a page has. Raises RequestError."""
    text = query.get("limit", str(default))
    if not (text.isdecimal() and len(text) < 8 and 1 <= int(text) <= most):
        raise RequestError(f"limit must be a number from 1 to {most}", param="limit")
    return int(text)


def ids_after(ids: Sequence[str], after: str | None) -> Sequence[str]:
    """Return the ids behind the one that a page ended with. Raises RequestError for an unknown one."""
    if after is None:
        return ids
    if after not in ids:
        raise RequestError(f"after: there is no object {after[:64]!r}", param="after")
    return ids[ids.index(after) + 1 :]


def page_of(objects: Sequence[dict[str, Any]], limit: int) -> dict[str, Any]:
    """Return a list object with the first `limit` of these."""
    page = list(objects[:limit])
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return {"object": "list", "data": page, **ends, "has_more": len(objects) > limit}


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


def _routes(services: Services) -> list[Route | APIRouter]:
    uploads = Uploads(services.files, services.settings, services.yielder)
    return [FileRoutes(services.files, uploads).router]


FILES = HttpDialect(_routes, bodies=())
