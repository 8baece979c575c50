"""The routes of `/v1/batches`. A caller sees only the batches of its own tenant; others do not exist for it."""

from __future__ import annotations

from functools import partial
from itertools import islice
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field, ValidationError
from starlette.routing import Route

from penstock.contract.errors import RequestError
from penstock.contract.fields import Named
from penstock.contract.problems import request_error
from penstock.contract.retries import MAX_ATTEMPTS, MAX_RETRY_BACKOFF_S
from penstock.gateway.errors import soon
from penstock.gateway.http.dialect import HttpDialect, Services
from penstock.gateway.http.file_content import FileContent, content_of
from penstock.gateway.http.pages import ids_after, limit_of, page_of, query_of
from penstock.gateway.http.stored_batches import RUN_BATCHES, progress_of
from penstock.gateway.request.reading import RequestReader, caller_of, idempotency_key_of
from penstock.producer.batch.endpoints import ENDPOINTS
from penstock.producer.batch.finished import ERROR, OUTPUT
from penstock.producer.client import AsyncClient
from penstock.producer.files.service import Files
from penstock.producer.stored_batches.flow_view import view_of, with_jobs
from penstock.producer.stored_batches.parts import parts_content
from penstock.queue.files.batch import (
    FLOW_ENDPOINT,
    BatchRecord,
    BatchSpec,
    is_batch_id,
    is_of_messages,
    new_batch_id,
    window_s,
)
from penstock.queue.files.batch_records import no_batch
from penstock.queue.files.file_records import MAX_LIFE_S

DEFAULT_LIMIT, MAX_LIMIT = 20, 100
MAX_ROWS = 1000
"""Most rows of a flow in one page."""
ROW_STATES = ("waiting", "ready", "succeeded", "failed", "skipped", "cancelled", "expired")
"""States of a row by which a list can be filtered. A row that is ready may be queued, or run."""
_TIMES = (*("in_progress", "expires", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"),)
_Text = Annotated[str, Field(max_length=512)]


class _ExpiresAfter(Named):
    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=1, le=MAX_LIFE_S)]


class CreateBatch(Named):
    """The body of `POST /v1/batches`."""

    input_file_id: Annotated[str, Field(max_length=64)]
    endpoint: Annotated[str, Field(max_length=64)]
    completion_window: Annotated[str, Field(max_length=16)]
    metadata: Annotated[dict[Annotated[str, Field(max_length=64)], _Text] | None, Field(max_length=16)] = None
    output_expires_after: _ExpiresAfter | None = None
    max_attempts: Annotated[int | None, Field(ge=1, le=MAX_ATTEMPTS)] = None
    retry_backoff_s: Annotated[float | None, Field(ge=0, le=MAX_RETRY_BACKOFF_S)] = None


_BODY = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": CreateBatch.model_json_schema(ref_template="#/{model}")}},
    }
}


def batch_object(batch: BatchRecord, now_s: float) -> dict[str, Any]:
    """Return OpenAI's object of a batch, with our own fields."""
    errors = [
        {"code": one.code, "message": one.message, "param": one.param, "line": one.line} for one in batch.problems
    ]
    retries = {"max_attempts": batch.spec.max_attempts, "retry_backoff_s": batch.spec.retry_backoff_s}
    return {
        "id": batch.batch_id,
        "object": "batch",
        "endpoint": batch.spec.endpoint,
        "errors": {"object": "list", "data": errors} if errors else None,
        "input_file_id": batch.spec.input_file_id,
        "completion_window": batch.spec.completion_window,
        "status": batch.status,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": batch.times["created"] // 1000,
        **{f"{name}_at": batch.times[name] // 1000 if name in batch.times else None for name in _TIMES},
        "request_counts": {"total": batch.num_rows, "completed": batch.num_completed, "failed": batch.num_failed},
        "usage": {
            "input_tokens": batch.input_tokens,
            "input_tokens_details": {"cached_tokens": batch.cached_tokens},
            "output_tokens": batch.output_tokens,
            "output_tokens_details": {"reasoning_tokens": batch.reasoning_tokens},
            "total_tokens": batch.input_tokens + batch.output_tokens,
        },
        "metadata": batch.spec.metadata,
        **{name: value for name, value in retries.items() if value is not None},
        **progress_of(batch, now_s),
    }


class BatchRoutes:
    """The routes of batches."""

    def __init__(self, client: AsyncClient, reader: RequestReader, files: Files) -> None:
        self._client = client
        self._records = client.batches
        self._reader = reader
        self._files = files
        self.router = APIRouter()
        path = "/v1/batches"
        one = f"{path}/{{batch_id}}"
        self.router.add_api_route(path, self.create_batch, methods=["POST"], openapi_extra=_BODY)
        self.router.add_api_route(path, self.list_batches)
        self.router.add_api_route(one, self.retrieve_batch)
        self.router.add_api_route(f"{one}/cancel", self.cancel_batch, methods=["POST"])
        self.router.add_api_route(f"{one}/pause", self.pause_batch, methods=["POST"])
        self.router.add_api_route(f"{one}/resume", self.resume_batch, methods=["POST"])
        self.router.add_api_route(f"{one}/output", self.retrieve_output)
        self.router.add_api_route(f"{one}/errors", self.retrieve_errors)
        self.router.add_api_route(f"{one}/rows", self.list_rows)

    async def create_batch(self, request: Request) -> dict[str, Any]:
        """Make a batch of the rows of a stored file, each a request of the same endpoint.

        With the endpoint `flow`, each row has an endpoint of its own, and may wait for other rows. A repeated
        request with the same Idempotency-Key gets the same batch.
        """
        try:
            body = CreateBatch.model_validate_json(await self._reader.small_json(request))
        except ValidationError as error:
            raise request_error(error) from None
        if body.endpoint not in (known := {*ENDPOINTS, FLOW_ENDPOINT}):
            raise RequestError(f"endpoint must be one of {', '.join(sorted(known))}", param="endpoint")
        caller, key = caller_of(request), idempotency_key_of(request)
        life_s = None if body.output_expires_after is None else body.output_expires_after.seconds
        spec = BatchSpec(
            body.input_file_id,
            body.endpoint,
            body.completion_window,
            body.metadata,
            life_s,
            caller.key_id,
            max_attempts=body.max_attempts,
            retry_backoff_s=body.retry_backoff_s,
        )
        await self._files.storage()
        batch_id = await self._records.create(
            new_batch_id(),
            caller.tenant,
            spec,
            window_ms=1000 * window_s(body.completion_window),
            max_open=self._files.settings.max_tenant_batches,
            key=key,
            terms=caller if caller.key_id else None,
        )
        return await self._shown(batch_id, caller.tenant)

    async def list_batches(self, request: Request) -> dict[str, Any]:
        """List the caller's batches, newest first. `?limit=` and `?after=` (the id of a batch)."""
        query = query_of(request, "limit", "after")
        limit = limit_of(query, DEFAULT_LIMIT, MAX_LIMIT)
        async with soon():
            all_ids = await self._records.ids(caller_of(request).tenant)
            ids = ids_after([one for one in all_ids if not is_of_messages(one)], query.get("after"))
            batches = await self._records.several(ids[: limit + 1])
        return page_of([batch_object(batch, self._records.now_s()) for batch in batches], limit)

    async def retrieve_batch(self, request: Request, batch_id: str) -> dict[str, Any]:
        """Return a batch: its state, counts, usage and files."""
        async with soon():
            return await self._shown(batch_id, caller_of(request).tenant)

    async def cancel_batch(self, request: Request, batch_id: str) -> dict[str, Any]:
        """Cancel a batch. Answered rows stay in its output; the others get the error `batch_cancelled`."""
        tenant = caller_of(request).tenant
        await self._records.cancel(_checked_id(batch_id), tenant)
        return await self._shown(batch_id, tenant)

    async def pause_batch(self, request: Request, batch_id: str) -> dict[str, Any]:
        """Let no further rows of a batch into the queue. Those in it go on, and so does its completion window."""
        return await self._paused(request, batch_id, paused=True)

    async def resume_batch(self, request: Request, batch_id: str) -> dict[str, Any]:
        """Let the rows of a paused batch into the queue again."""
        return await self._paused(request, batch_id, paused=False)

    async def retrieve_output(self, request: Request, batch_id: str) -> Response:
        """Return the answered rows, also while the batch runs. Rows are only ever appended, so a Range goes on."""
        return await self._rows(request, batch_id, OUTPUT)

    async def retrieve_errors(self, request: Request, batch_id: str) -> Response:
        """Return the failed rows, also while the batch runs. Rows are only ever appended, so a Range goes on."""
        return await self._rows(request, batch_id, ERROR)

    async def list_rows(self, request: Request, batch_id: str) -> dict[str, Any]:
        """List the rows of a flow: the state of each, and what it waits for. `?limit=` and `?after=` (a custom_id).

        `?state=` lists only the rows in that state.
        """
        query = query_of(request, "limit", "after", "state")
        limit, state = limit_of(query, DEFAULT_LIMIT, MAX_ROWS), query.get("state")
        if state is not None and state not in ROW_STATES:
            raise RequestError(f"state must be one of {', '.join(ROW_STATES)}", param="state")
        async with soon():
            batch = await self._records.find(_checked_id(batch_id), caller_of(request).tenant)
        view = await view_of(self._client, self._files, batch)

        def read() -> tuple[list[dict[str, Any]], dict[str, int]]:
            numbers = (one for one in view.numbers_after(query.get("after")) if state in (None, view.state_of(one)))
            return [view.row_object(number) for number in islice(numbers, limit + 1)], view.counts()

        rows, counts = await self._files.on_thread(read)
        await with_jobs(self._client, batch, rows)
        page = page_of(rows, limit)
        # The page goes on behind a name.
        return {**page, "last_id": rows[min(limit, len(rows)) - 1]["custom_id"] if rows else None, "counts": counts}

    async def _rows(self, request: Request, batch_id: str, kind: str) -> Response:
        tenant = caller_of(request).tenant
        _checked_id(batch_id)
        async with soon():
            # Before the record: parts that go meanwhile are in a file that it names.
            parts = await self._records.parts(batch_id) if is_batch_id(batch_id) else []
            batch = await self._records.find(batch_id, tenant)
        file_id = batch.output_file_id if kind == OUTPUT else batch.error_file_id
        if file_id is not None:
            return await content_of(self._files, request, await self._files.find(file_id, tenant))
        of_kind = [] if not batch.is_open else [part for part in parts if part.kind == kind]
        num_bytes = sum(part.num_bytes for part in of_kind)
        content = FileContent(
            f"{batch_id}_{kind}.jsonl", num_bytes, request, partial(parts_content, self._files, of_kind)
        )
        await self._files.storage()
        return content

    async def _paused(self, request: Request, batch_id: str, *, paused: bool) -> dict[str, Any]:
        tenant = caller_of(request).tenant
        await self._records.pause(_checked_id(batch_id), tenant, paused=paused)
        return await self._shown(batch_id, tenant)

    async def _shown(self, batch_id: str, tenant: str) -> dict[str, Any]:
        return batch_object(await self._records.find(_checked_id(batch_id), tenant), self._records.now_s())


def _checked_id(batch_id: str) -> str:
    """Return the id of a batch. Raises NotFoundError for that of a message batch, which this API does not show."""
    if is_of_messages(batch_id):
        raise no_batch(batch_id)
    return batch_id


def _routes(services: Services) -> list[Route | APIRouter]:
    return [BatchRoutes(services.client, services.reader, services.files).router]


BATCHES = HttpDialect(_routes, background=RUN_BATCHES)
