"""The routes of `/v1/messages/batches`. A caller sees only the batches of its own tenant."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.routing import Route

from penstock.contract.errors import NotFoundError
from penstock.gateway.apis.message_batches.bodies import BatchBodies
from penstock.gateway.errors import soon
from penstock.gateway.http.dialect import HttpDialect, Services
from penstock.gateway.http.file_content import content_of
from penstock.gateway.http.pages import ids_of_page, list_of, query_of
from penstock.gateway.http.stored_batches import RUN_BATCHES, progress_of
from penstock.gateway.request.reading import caller_of, idempotency_key_of
from penstock.gateway.route_doc import object_of as schema_of
from penstock.gateway.settings import GatewaySettings
from penstock.producer.client import AsyncClient
from penstock.producer.files.service import Files
from penstock.producer.files.storage import DAY_S
from penstock.queue.files.batch import MESSAGES_ENDPOINT, BatchRecord, BatchSpec, is_of_messages, new_message_batch_id
from penstock.queue.files.batch_records import CheckedRows, no_batch
from penstock.queue.files.file_records import MESSAGE_BATCH, object_of

_PATH = "/v1/messages/batches"
_WINDOW = "24h"


def _body(apis: Sequence[HttpDialect]) -> dict[str, Any]:
    """Return what the document says of the body. Its requests are bodies of `/v1/messages`, if an API has these."""
    of_paths = {path: schema for api in apis for path, schema in api.socket_bodies.items()}
    schema = of_paths.get(MESSAGES_ENDPOINT)
    params = {"type": "object"} if schema is None else {"$ref": f"#/components/schemas/{schema.__name__}"}
    custom_id = {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,64}$"}
    request = _closed(custom_id=custom_id, params=params)
    body = _closed(requests={"type": "array", "minItems": 1, "items": request})
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": body}}}}


def _closed(**properties: Any) -> dict[str, Any]:
    return {**schema_of(**properties), "additionalProperties": False}


def batch_object(batch: BatchRecord, base_url: str, now_s: float) -> dict[str, Any]:
    """Return Anthropic's object of a batch, with our own fields: those of its progress, and `answered`."""
    times, is_open = batch.times, batch.is_open
    stopped = {batch.status: batch.num_stopped}
    counts = {"processing": batch.num_rows, **dict.fromkeys(("succeeded", "errored", "canceled", "expired"), 0)}
    if not is_open:
        counts = {
            "processing": 0,
            "succeeded": batch.num_completed,
            # A batch fails if the storage has lost its input. Which requests were not answered is lost then.
            "errored": batch.num_rows - batch.num_completed - batch.num_stopped,
            "canceled": stopped.get("cancelled", 0),
            "expired": stopped.get("expired", 0),
        }
    archived_ms = times["created"] + 1000 * (batch.spec.output_life_s or 0)
    is_archived = now_s * 1000 >= archived_ms
    return {
        "id": batch.batch_id,
        "type": "message_batch",
        "processing_status": "canceling" if batch.status == "cancelling" else "in_progress" if is_open else "ended",
        "request_counts": counts,
        "created_at": _shown(times["created"]),
        "expires_at": _shown(times["expires"]),
        "ended_at": _shown(times.get(batch.status)) if not is_open else None,
        "cancel_initiated_at": _shown(times.get("cancelling")),
        "archived_at": _shown(archived_ms) if is_archived else None,
        "results_url": None if is_open or is_archived else f"{base_url}{_PATH}/{batch.batch_id}/results",
        **progress_of(batch, now_s),
        "answered": batch.num_completed + batch.num_failed,
    }


def _shown(time_ms: int | None) -> str | None:
    """Return a time as RFC 3339 writes it."""
    if time_ms is None:
        return None
    return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class MessageBatchRoutes:
    """The routes of message batches."""

    def __init__(
        self, client: AsyncClient, settings: GatewaySettings, files: Files, apis: Sequence[HttpDialect]
    ) -> None:
        self._records = client.batches
        self._files = files
        self._bodies = BatchBodies(files, settings)
        self._ignores_unknown = settings.unknown_fields == "ignore"
        self.router = APIRouter()
        one = f"{_PATH}/{{batch_id}}"
        self.router.add_api_route(_PATH, self.create_message_batch, methods=["POST"], openapi_extra=_body(apis))
        self.router.add_api_route(_PATH, self.list_message_batches)
        self.router.add_api_route(one, self.retrieve_message_batch)
        self.router.add_api_route(one, self.delete_message_batch, methods=["DELETE"])
        self.router.add_api_route(f"{one}/results", self.retrieve_message_batch_results)
        self.router.add_api_route(f"{one}/cancel", self.cancel_message_batch, methods=["POST"])
        self.router.add_api_route(f"{one}/pause", self.pause_message_batch, methods=["POST"])
        self.router.add_api_route(f"{one}/resume", self.resume_message_batch, methods=["POST"])

    async def create_message_batch(self, request: Request) -> dict[str, Any]:
        """Make a batch of requests, each with the fields of `/v1/messages`.

        A repeated request with the same Idempotency-Key gets the same batch.
        """
        caller, key, settings = caller_of(request), idempotency_key_of(request), self._files.settings
        await self._files.storage()
        async with self._bodies.stored(request) as found:
            upload, batch_id = found.upload, new_message_batch_id()
            spec = BatchSpec(
                upload.file_id,
                MESSAGES_ENDPOINT,
                _WINDOW,
                output_life_s=int(settings.message_batch_days * DAY_S),
                key_id=caller.key_id,
                ignores_unknown=self._ignores_unknown,
            )
            rows = CheckedRows(found.num_rows, DAY_S * 1000, settings.max_tenant_batches, settings.max_tenant_rows)
            made = await self._records.create_with_input(
                batch_id,
                spec,
                upload.new_file(f"{batch_id}.jsonl", MESSAGE_BATCH, 0),
                tenant=caller.tenant,
                rows=rows,
                key=key,
                digest=upload.digest,
                terms=caller if caller.key_id else None,
            )
            upload.note_saved()
            if made != batch_id:
                await self._files.delete_garbage(object_of(upload.file_id))
        return await self._object_of(request, made)

    async def list_message_batches(self, request: Request) -> dict[str, Any]:
        """List the caller's message batches, newest first: `?limit=`, and `?after_id=` or `?before_id=`."""
        query = query_of(request, "limit", "after_id", "before_id", "beta")
        async with soon():
            ids = [one for one in await self._records.ids(caller_of(request).tenant) if is_of_messages(one)]
            page, has_more = ids_of_page(ids, query, "message batch")
            batches = await self._records.several(page)
        now_s, base_url = self._records.now_s(), base_url_of(request)
        return list_of([batch_object(batch, base_url, now_s) for batch in batches], has_more=has_more)

    async def retrieve_message_batch(self, request: Request, batch_id: str) -> dict[str, Any]:
        """Return a message batch: its state, its counts and where its results are."""
        return await self._object_of(request, batch_id)

    async def cancel_message_batch(self, request: Request, batch_id: str) -> dict[str, Any]:
        """Cancel a message batch. Answered requests keep their results; the others get the result `canceled`."""
        await self._records.cancel(_checked_id(batch_id), caller_of(request).tenant)
        return await self._object_of(request, batch_id)

    async def pause_message_batch(self, request: Request, batch_id: str) -> dict[str, Any]:
        """Let no further requests of a message batch into the queue. Those in it go on, and so do its 24 hours."""
        return await self._paused(request, batch_id, paused=True)

    async def resume_message_batch(self, request: Request, batch_id: str) -> dict[str, Any]:
        """Let the requests of a paused message batch into the queue again."""
        return await self._paused(request, batch_id, paused=False)

    async def delete_message_batch(self, request: Request, batch_id: str) -> dict[str, Any]:
        """Delete a message batch that has ended, with its results."""
        batch = await self._find(request, batch_id)
        await self._records.delete(batch_id, batch.tenant)
        if batch.output_file_id is not None:
            await self._files.delete_garbage(object_of(batch.output_file_id))
        return {"id": batch_id, "type": "message_batch_deleted"}

    async def retrieve_message_batch_results(self, request: Request, batch_id: str) -> Response:
        """Return the results of a message batch that has ended: a line of JSON for each request, in any order."""
        batch = await self._find(request, batch_id)
        if batch.is_open:
            message = f"batch {batch_id} has not ended, so it has no results yet"
            raise NotFoundError(message, code="no_results", param="batch_id")
        try:
            async with soon():
                file = await self._files.find(batch.output_file_id or "", batch.tenant)
        except NotFoundError:
            days = f"{self._files.settings.message_batch_days:g}"
            message = f"the results of batch {batch_id} are gone: they are kept for {days} days after its creation"
            raise NotFoundError(message, code="no_results", param="batch_id") from None
        return await content_of(self._files, request, file, "application/x-jsonl")

    async def _paused(self, request: Request, batch_id: str, *, paused: bool) -> dict[str, Any]:
        await self._records.pause(_checked_id(batch_id), caller_of(request).tenant, paused=paused)
        return await self._object_of(request, batch_id)

    async def _find(self, request: Request, batch_id: str) -> BatchRecord:
        async with soon():
            return await self._records.find(_checked_id(batch_id), caller_of(request).tenant)

    async def _object_of(self, request: Request, batch_id: str) -> dict[str, Any]:
        return batch_object(await self._find(request, batch_id), base_url_of(request), self._records.now_s())


def _checked_id(batch_id: str) -> str:
    """Return the id of a message batch. Raises NotFoundError for that of another batch."""
    if not is_of_messages(batch_id):
        raise no_batch(batch_id)
    return batch_id


def base_url_of(request: Request) -> str:
    """Return the address under which the caller reached the gateway: empty if it names no host.

    A proxy that ends TLS says so with X-Forwarded-Proto.
    """
    host = request.headers.get("host")
    scheme = request.headers.get("x-forwarded-proto", request.url.scheme).partition(",")[0].strip().lower()
    return f"{scheme if scheme in ('http', 'https') else 'http'}://{host}" if host else ""


def _routes(services: Services) -> list[Route | APIRouter]:
    return [MessageBatchRoutes(services.client, services.settings, services.files, services.apis).router]


MESSAGE_BATCHES = HttpDialect(_routes, background=RUN_BATCHES)
