"""The routes that steer accepted jobs: changes of one job, actions on all that a filter names, and pauses."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field, StringConstraints, ValidationError

from penstock.contract.errors import NotFoundError
from penstock.contract.fields import NAME_PATTERN, Wire
from penstock.contract.job_actions import MAX_POOL_CHARS, ActionName, JobChange, JobFilter, checked_class
from penstock.contract.priority import ClassName, allowed_class
from penstock.contract.problems import request_error
from penstock.contract.tenant import ApiKey
from penstock.gateway.apis.jobs.answers import links_of
from penstock.gateway.http.pages import query_of
from penstock.gateway.request.reading import RequestReader, caller_of
from penstock.gateway.stream.answer import JOB_HEADER
from penstock.producer.client import AsyncClient
from penstock.producer.client.job_objects import job_object

ALL_TENANTS = "*"
"""The name of a tenant that means all of them."""
MAX_BULK_ID_CHARS = 64
MAX_MOMENT_CHARS = 64

PoolName = Annotated[str, StringConstraints(min_length=1, max_length=MAX_POOL_CHARS)]
OwnerName = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]


class ChangeBody(Wire):
    """Body of `PATCH /v1/jobs/{id}`: when the job may run, or its class."""

    not_before_s: float | Annotated[str, Field(max_length=MAX_MOMENT_CHARS)] | None = None
    priority: ClassName | None = None
    background: bool | None = None


class FilterBody(Wire):
    """The jobs of a bulk action: those to which all given parts apply."""

    tenant: Literal["*"] | OwnerName | None = None
    pool: PoolName | None = None
    state: str | list[str] | None = None
    priority: ClassName | None = None
    background: bool | None = None
    tag: str | None = None
    submitted_after: float | None = None
    submitted_before: float | None = None
    custom_id: str | None = None
    metadata: dict[str, str] | None = None


class BulkBody(Wire):
    """Body of `POST /v1/jobs/bulk`."""

    action: ActionName
    filter: Annotated[FilterBody, Field(default_factory=FilterBody)]
    dry_run: bool = False
    all_jobs: bool = False
    not_before_s: float | Annotated[str, Field(max_length=MAX_MOMENT_CHARS)] | None = None
    priority: ClassName | None = None
    background: bool | None = None


class PauseBody(Wire):
    """Body of `POST /v1/jobs/pause` and `POST /v1/jobs/resume`: the pool, or what is paused of it."""

    pool: PoolName
    tenant: OwnerName | None = None
    priority: ClassName | None = None
    background: bool | None = None


class ControlRoutes:
    """The routes that steer the jobs of a caller's tenant, or for an admin those of all tenants."""

    def __init__(self, client: AsyncClient, reader: RequestReader) -> None:
        self._client = client
        self._control = client.control
        self._reader = reader
        self.router = APIRouter()
        for path, method, endpoint in (
            ("/v1/jobs/bulk", "POST", self.start_bulk),
            ("/v1/jobs/bulk", "GET", self.list_bulks),
            ("/v1/jobs/bulk/{bulk_id}", "GET", self.show_bulk),
            ("/v1/jobs/bulk/{bulk_id}", "DELETE", self.stop_bulk),
            ("/v1/jobs/paused", "GET", self.paused),
            ("/v1/jobs/pause", "POST", self.pause),
            ("/v1/jobs/resume", "POST", self.resume),
            ("/v1/jobs/{job_id}", "PATCH", self.change),
            ("/v1/jobs/{job_id}/retry", "POST", self.retry),
        ):
            self.router.add_api_route(path, endpoint, methods=[method])

    async def change(self, request: Request, job_id: str) -> dict[str, Any]:
        """Reschedule a job that no node runs (`not_before_s`), or change its class (`priority`, `background`)."""
        caller = caller_of(request)
        given = (await self._body(request, ChangeBody)).model_dump()
        change = JobChange.of(given)
        _check_class(change, caller)
        await self._control.change(job_id, change, tenant=caller.tenant)
        status = await self._client.status(job_id, tenant=caller.tenant)
        return job_object(status) | {"links": links_of(job_id)}

    async def retry(self, request: Request, job_id: str) -> Response:
        """Submit the request of a job that failed, expired or was canceled as a new job.

        A job has one retry; a repeated call returns it.
        """
        caller = caller_of(request)
        submitted = await self._control.retry(job_id, tenant=caller.tenant, terms=caller.metered_terms)
        links = links_of(submitted.job_id)
        answer = {"id": submitted.job_id, "object": "job", "state": submitted.state, "retry_of": job_id, "links": links}
        return JSONResponse(answer, 202, {"Location": links["self"], JOB_HEADER: submitted.job_id})

    async def start_bulk(self, request: Request) -> Response:
        """Cancel, retry, reschedule or change the class of all jobs that a filter names.

        The action is stored, and goes on without its caller. The path in `Location` reports it.
        """
        caller = caller_of(request)
        body = await self._body(request, BulkBody)
        given = body.filter.model_dump()
        tenant = given.pop("tenant") or caller.tenant
        if tenant != caller.tenant or "infer" not in caller.scopes:
            caller.require("admin")
        change = JobChange.of(body.model_dump(exclude={"filter", "dry_run", "all_jobs"}))
        _check_class(change, caller)
        wanted = JobFilter.of(given, tenant=None if tenant == ALL_TENANTS else tenant)
        bulk_id = await self._control.start(
            *(change, wanted),
            owner=caller.tenant,
            terms=caller.metered_terms,
            dry_run=body.dry_run,
            all_jobs=body.all_jobs,
        )
        report = await self._control.report(bulk_id, tenant=caller.tenant)
        return JSONResponse(report.as_object(), 202, {"Location": f"/v1/jobs/bulk/{bulk_id}"})

    async def list_bulks(self, request: Request) -> dict[str, Any]:
        """List the bulk actions that the caller's tenant has begun and that have not ended, oldest first."""
        query_of(request)
        reports = await self._control.running(tenant=caller_of(request).tenant)
        return {"object": "list", "data": [report.as_object() for report in reports]}

    async def show_bulk(self, request: Request, bulk_id: str) -> dict[str, Any]:
        """Return what a bulk action has done so far, for a day after its end."""
        return (await self._control.report(_checked(bulk_id), tenant=caller_of(request).tenant)).as_object()

    async def stop_bulk(self, request: Request, bulk_id: str) -> dict[str, Any]:
        """Give up a bulk action where it is. What it has changed stays changed."""
        return (await self._control.stop(_checked(bulk_id), tenant=caller_of(request).tenant)).as_object()

    async def paused(self, request: Request) -> dict[str, Any]:
        """List what is paused: for an admin everything, else what concerns the caller's tenant."""
        query_of(request)
        caller = caller_of(request)
        is_admin = "admin" in caller.scopes
        found = [one for one in await self._control.paused() if is_admin or one.tenant in (None, caller.tenant)]
        return {"object": "list", "data": [one.as_object() for one in found]}

    async def pause(self, request: Request) -> dict[str, Any]:
        """Let nodes take no job of a pool, of a class, or of a tenant. A tenant may pause itself, an admin the rest."""
        return await self._set_pause(request, on=True)

    async def resume(self, request: Request) -> dict[str, Any]:
        """End a pause."""
        return await self._set_pause(request, on=False)

    async def _set_pause(self, request: Request, *, on: bool) -> dict[str, Any]:
        caller = caller_of(request)
        body = await self._body(request, PauseBody)
        if body.tenant != caller.tenant or "infer" not in caller.scopes:
            caller.require("admin")
        act = self._control.pause if on else self._control.resume
        given = {"priority": checked_class(body.priority), "background": body.background}
        found = await act(body.pool, tenant=body.tenant, **given)
        is_admin = "admin" in caller.scopes
        shown = [one.as_object() for one in found if is_admin or one.tenant in (None, caller.tenant)]
        return {"object": "list", "data": shown}

    async def _body(self, request: Request, schema: type[Any]) -> Any:
        raw = await self._reader.small_json(request)
        try:
            return schema.model_validate_json(raw or json.dumps({}))
        except ValidationError as error:
            raise request_error(error) from None


def _check_class(change: JobChange, caller: ApiKey) -> None:
    """Raise ForbiddenError for a class above the caller's."""
    if change.priority is not None:
        owner = "this API key" if caller.key_id else "this gateway while it has no API keys (open_highest_class)"
        allowed_class(change.priority.label, caller.highest_class, owner)


def _checked(bulk_id: str) -> str:
    if not (bulk_id.isalnum() and len(bulk_id) <= MAX_BULK_ID_CHARS):
        raise NotFoundError(f"no bulk action {bulk_id[:MAX_BULK_ID_CHARS]!r}", code="bulk_not_found", param="bulk_id")
    return bulk_id
