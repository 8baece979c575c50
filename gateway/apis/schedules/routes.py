"""`/v1/schedules`: jobs and batches of a tenant that start by themselves."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Request
from pydantic import Field, ValidationError
from starlette.routing import Route

from penstock.contract.errors import PenstockError, RequestError
from penstock.contract.fields import Wire
from penstock.contract.problems import put_under, request_error
from penstock.contract.schedule import MAX_CRON_CHARS, MAX_NAME_CHARS, MAX_ZONE_CHARS, MissedRule, OverlapRule
from penstock.gateway.apis.schedules.runner import ScheduleRunner
from penstock.gateway.errors import soon
from penstock.gateway.http.dialect import HttpDialect, PrepareJob, Services
from penstock.gateway.http.pages import ids_after, limit_of, page_of, query_of
from penstock.gateway.request.reading import AFTER, RequestReader, caller_of
from penstock.producer.batch.endpoints import ENDPOINTS
from penstock.producer.client import AsyncClient
from penstock.producer.client.schedules import MAX_SHOWN_RUNS, SHOWN_RUNS
from penstock.queue.files.batch import FLOW_ENDPOINT, window_s

DEFAULT_PAGE = 20
MAX_PAGE = 100
MAX_MOMENT_CHARS = 64
Body = TypeVar("Body", bound=Wire)


class BatchPart(Wire):
    """The batch that a schedule starts, as `POST /v1/batches` takes it."""

    input_file_id: Annotated[str, Field(min_length=1, max_length=128)]
    endpoint: Annotated[str, Field(min_length=1, max_length=128)]
    completion_window: Annotated[str, Field(max_length=16)] = "24h"
    metadata: Annotated[dict[str, str] | None, Field(max_length=16)] = None
    max_attempts: int | None = None
    retry_backoff_s: float | None = None


class ScheduleBody(Wire):
    """Body of `POST /v1/schedules`: when, and a `job` as `POST /v1/jobs` takes it or a `batch`."""

    name: Annotated[str, Field(max_length=MAX_NAME_CHARS)] = ""
    cron: Annotated[str | None, Field(min_length=1, max_length=MAX_CRON_CHARS)] = None
    zone: Annotated[str, Field(min_length=1, max_length=MAX_ZONE_CHARS)] = "UTC"
    every_s: float | None = None
    at: Annotated[str, Field(max_length=MAX_MOMENT_CHARS)] | float | None = None
    missed: MissedRule = "one"
    overlap: OverlapRule = "skip"
    job: dict[str, Any] | None = None
    batch: BatchPart | None = None


class EmptyBody(Wire):
    """A body without members."""


class ScheduleRoutes:
    """The routes of a tenant's schedules."""

    def __init__(self, client: AsyncClient, reader: RequestReader, prepare_job: PrepareJob | None) -> None:
        """`prepare_job`: checks the body of a job; None if this gateway has no `/v1/jobs`."""
        self._schedules = client.schedules
        self._reader = reader
        self._prepare_job = prepare_job
        self.router = APIRouter()
        one = "/v1/schedules/{schedule_id}"
        for path, method, endpoint in (
            ("/v1/schedules", "POST", self.create_schedule),
            ("/v1/schedules", "GET", self.list_schedules),
            (one, "GET", self.show_schedule),
            (one, "DELETE", self.delete_schedule),
            (f"{one}/pause", "POST", self.pause_schedule),
            (f"{one}/resume", "POST", self.resume_schedule),
            (f"{one}/run", "POST", self.run_schedule),
            (f"{one}/runs", "GET", self.list_runs),
        ):
            self.router.add_api_route(path, endpoint, methods=[method])

    async def create_schedule(self, request: Request) -> dict[str, Any]:
        """Start a `job` or a `batch` by a `cron` line in a time `zone`, `every_s` seconds, or once, `at` a moment."""
        caller, body = caller_of(request), await self._body(request, ScheduleBody)
        if (body.job is None) == (body.batch is None):
            raise RequestError("job: give either a job or a batch", param="job")
        given: dict[str, Any] = body.model_dump(include={"name", "cron", "zone", "every_s", "missed", "overlap"})
        given |= {"at": _moment_of(body.at), "key_id": caller.key_id}
        if body.batch is not None:
            part = body.batch
            window_s(part.completion_window)
            if part.endpoint not in (known := {*ENDPOINTS, FLOW_ENDPOINT}):
                message = f"batch.endpoint must be one of {', '.join(sorted(known))}"
                raise RequestError(message, param="batch.endpoint")
            made = self._schedules.create_batch(
                part.input_file_id,
                part.endpoint,
                completion_window=part.completion_window,
                metadata=part.metadata,
                max_attempts=part.max_attempts,
                retry_backoff_s=part.retry_backoff_s,
                tenant=caller.tenant,
                **given,
            )
            return self._schedules.object_of(await made)
        if self._prepare_job is None:
            raise RequestError("job: this gateway does not have /v1/jobs", code="unsupported_value", param="job")
        try:
            prompt, options = await self._prepare_job(request, json.dumps(body.job).encode())
        except PenstockError as error:
            put_under(error, "job")
            raise
        try:
            made_of_job = await self._schedules.create(prompt, **given, **options)
        except PenstockError as error:
            if error.param is not None and error.param not in ScheduleBody.model_fields:
                put_under(error, "job")
            raise
        return self._schedules.object_of(made_of_job)

    async def list_schedules(self, request: Request) -> dict[str, Any]:
        """List the caller's schedules, oldest first. `?limit=` and `?after=` (the id of the last one before)."""
        query = query_of(request, "limit", AFTER)
        limit = limit_of(query, DEFAULT_PAGE, MAX_PAGE)
        async with soon():
            found = {one.id: one for one in await self._schedules.all(tenant=caller_of(request).tenant)}
        ids = ids_after([*found], query.get(AFTER))
        return page_of([self._schedules.object_of(found[one]) for one in ids[: limit + 1]], limit)

    async def show_schedule(self, request: Request, schedule_id: str) -> dict[str, Any]:
        """Return a schedule with its next runs. `?next_runs=` says how many, up to 100."""
        text = query_of(request, "next_runs").get("next_runs", str(SHOWN_RUNS))
        if not (text.isdecimal() and len(text) < 4 and int(text) <= MAX_SHOWN_RUNS):
            raise RequestError(f"next_runs must be from 0 to {MAX_SHOWN_RUNS}", param="next_runs")
        async with soon():
            schedule = await self._schedules.get(schedule_id, tenant=caller_of(request).tenant)
        return schedule.as_object(self._schedules.next_runs(schedule, int(text)))

    async def delete_schedule(self, request: Request, schedule_id: str) -> dict[str, Any]:
        """Delete a schedule. The jobs and batches that it started go on."""
        await self._schedules.delete(schedule_id, tenant=caller_of(request).tenant)
        return {"id": schedule_id, "object": "schedule.deleted", "deleted": True}

    async def pause_schedule(self, request: Request, schedule_id: str) -> dict[str, Any]:
        """Let a schedule be due no more, until it is resumed."""
        await self._body(request, EmptyBody)
        tenant = caller_of(request).tenant
        return self._schedules.object_of(await self._schedules.pause(schedule_id, tenant=tenant))

    async def resume_schedule(self, request: Request, schedule_id: str) -> dict[str, Any]:
        """Let a paused schedule be due again, from now on."""
        await self._body(request, EmptyBody)
        tenant = caller_of(request).tenant
        return self._schedules.object_of(await self._schedules.resume(schedule_id, tenant=tenant))

    async def run_schedule(self, request: Request, schedule_id: str) -> dict[str, Any]:
        """Let a run be due now, beside the others."""
        await self._body(request, EmptyBody)
        tenant = caller_of(request).tenant
        return self._schedules.object_of(await self._schedules.run_now(schedule_id, tenant=tenant))

    async def list_runs(self, request: Request, schedule_id: str) -> dict[str, Any]:
        """List the newest 100 runs of a schedule, the newest first."""
        query_of(request)
        async with soon():
            found = await self._schedules.runs(schedule_id, tenant=caller_of(request).tenant)
        return {"object": "list", "data": [{"object": "schedule.run", **run.as_object()} for run in found]}

    async def _body(self, request: Request, schema: type[Body]) -> Body:
        # Clients send neither a body nor a content type if a request needs no fields.
        is_empty = request.headers.get("content-length", "0") == "0" and "transfer-encoding" not in request.headers
        try:
            return schema.model_validate_json(b"{}" if is_empty else await self._reader.small_json(request) or b"{}")
        except ValidationError as error:
            raise request_error(error) from None


def _moment_of(given: str | float | None) -> datetime | float | None:
    """Return a moment given as RFC 3339 text or in Unix seconds. Raises RequestError."""
    if not isinstance(given, str):
        return given
    try:
        return datetime.fromisoformat(given)
    except ValueError:
        message = f"at: {given!r} is no time, such as 2026-12-24T08:00:00+01:00, and no number of Unix seconds"
        raise RequestError(message, param="at") from None


def _routes(services: Services) -> list[Route | APIRouter]:
    makers = (api.prepare_job for api in services.apis)
    prepare = next((make(services) for make in makers if make is not None), None)
    return [ScheduleRoutes(services.client, services.reader, prepare).router]


async def _run(services: Services) -> None:
    client = services.client
    await ScheduleRunner(client, services.files.settings.max_tenant_batches, client.servers.clock.now_s).run()


SCHEDULES = HttpDialect(_routes, background={"penstock schedules": _run})
