"""The routes of `/v1/files`. A caller sees only the files of its own tenant; others do not exist for it."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.routing import Route

from penstock.contract.errors import RequestError
from penstock.gateway.apis.files.upload import Uploads
from penstock.gateway.errors import soon
from penstock.gateway.http.dialect import HttpDialect, Services
from penstock.gateway.http.file_content import content_of
from penstock.gateway.http.pages import ids_after, limit_of, page_of, query_of
from penstock.gateway.request.reading import caller_of
from penstock.producer.files.service import Files
from penstock.queue.files.file_records import OF_MESSAGE_BATCHES, StoredFile, no_file

MAX_LIMIT = 10_000
DEFAULT_LIMIT = 1000
LOST = "the storage has lost the content of this file"
_READ_AT_ONCE = 500
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


def _routes(services: Services) -> list[Route | APIRouter]:
    uploads = Uploads(services.files, services.settings, services.yielder)
    return [FileRoutes(services.files, uploads).router]


async def _delete_expired(services: Services) -> None:
    await services.files.keep_clean()


FILES = HttpDialect(_routes, background={"penstock expired files": _delete_expired})
