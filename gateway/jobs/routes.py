"""The routes of the jobs API. A caller sees only the jobs of its own tenant; others do not exist for it."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from penstock.contract.errors import PenstockError, RequestError
from penstock.contract.job import RETURN_PROGRESS, lowered_max_tokens, pool_of
from penstock.contract.job_filter import JobFilter
from penstock.contract.problems import rename
from penstock.gateway.budget import SharedBudget
from penstock.gateway.errors import soon
from penstock.gateway.http.dialect import HttpDialect, Services
from penstock.gateway.jobs.answers import JobAnswer, JobEvents, links_of, stream_start_of
from penstock.gateway.jobs.control import ALL_TENANTS, ControlRoutes
from penstock.gateway.jobs.schemas import JobRequest
from penstock.gateway.request.generation import GenerationRequest
from penstock.gateway.request.jobs import check_logprobs, submit_options
from penstock.gateway.request.reading import AFTER, LAST_EVENT_HEADER, MAX_KEY_CHARS, RequestReader, caller_of
from penstock.gateway.request.socket_message import JOBS_PATH
from penstock.gateway.route_doc import TEXT, RouteDoc, object_of
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.stream.answer import JOB_HEADER, MAX_TOKENS_HEADER, Answers
from penstock.producer.client import AsyncClient
from penstock.producer.client.job_objects import job_object
from penstock.producer.client.request import choose_pool
from penstock.queue.broker.producer import Submitted
from penstock.runtime.cooperative import LoopYielder

# `POST /v1/jobs`: submit a job and return its id at once.


class SubmitJob:
    """The ASGI app of `POST /v1/jobs`."""

    schema = JobRequest
    doc = RouteDoc(
        "Queue one job and return its id at once.",
        object_of(id=TEXT, object=TEXT, state=TEXT, links=object_of(self=TEXT, stream=TEXT, cancel=TEXT)),
        status=202,
    )

    def __init__(self, client: AsyncClient, reader: RequestReader, max_logprobs: int) -> None:
        self._client = client
        self._reader = reader
        self._max_logprobs = max_logprobs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Queue one job and answer 202 with its id and links."""
        request = Request(scope, receive, send)
        body = await self._reader.read(request, self.schema)
        generation = self._reader.generation_of(request, body)
        try:
            submitted = await self._submit(generation)
        except PenstockError as error:
            rename(error, body.content.names)
            raise
        links = links_of(submitted.job_id)
        answer = {"id": submitted.job_id, "object": "job", "state": submitted.state, "links": links}
        headers = {"Location": links["self"], JOB_HEADER: submitted.job_id}
        if (limit := await self._lowered_limit(generation, pool_of(submitted.job_id))) is not None:
            headers[MAX_TOKENS_HEADER] = str(limit)
        await JSONResponse(answer, self.doc.status, headers)(scope, receive, send)

    async def _submit(self, generation: GenerationRequest) -> Submitted:
        content = generation.content
        if content.needs_token_details:
            pools = (await self._client.pools()).values()
            record = choose_pool(pools, content.model or None, hides_models=generation.hides_models)
            check_logprobs(content, record, self._max_logprobs)
        options = submit_options(generation)
        options["idempotency_key"] = _idempotency_key_of(generation)
        return await self._client.submit_unread(content.prompts[0], **options)

    async def _lowered_limit(self, generation: GenerationRequest, pool: str) -> int | None:
        """Return what the pool's context leaves of `max_tokens` at most, or None if it may leave all."""
        max_tokens = generation.content.params.max_tokens
        if not generation.lowers_max_tokens or max_tokens is None:
            return None
        record = (await self._client.pools()).get(pool)
        return None if record is None else lowered_max_tokens(max_tokens, record.max_model_len or None, 1)


def _idempotency_key_of(generation: GenerationRequest) -> str | None:
    """Return the key of the header or of the body. Raises RequestError if they differ, or for a wrong length."""
    in_header, in_body = generation.idempotency_key, generation.queueing.get("idempotency_key")
    if in_body is not None and not 1 <= len(in_body) <= MAX_KEY_CHARS:
        message = f"idempotency_key must have 1 to {MAX_KEY_CHARS} characters"
        raise RequestError(message, param="idempotency_key")
    if in_header is not None and in_body not in (None, in_header):
        raise RequestError("idempotency_key: differs from the header Idempotency-Key", param="idempotency_key")
    return in_header or in_body


# The routes of submitted jobs.

DEFAULT_PAGE_JOBS = 20
MAX_LIMIT_DIGITS = 4
_CANCEL_DOC = (
    "Cancel a job. The state is `cancelled`, `cancelling` (it ends within a step), or the state in which it had ended."
)


class JobRoutes:
    """The routes of the jobs of a caller's tenant."""

    def __init__(
        self,
        client: AsyncClient,
        settings: GatewaySettings,
        answers: Answers,
        yielder: LoopYielder,
        result_budget: SharedBudget,
    ) -> None:
        self._client = client
        self._timeout_s = settings.send_timeout_s
        self._answers = answers
        self._yielder = yielder
        self._result_budget = result_budget
        self.router = APIRouter()
        self.router.add_api_route("/v1/jobs", self.list_jobs)
        self.router.add_api_route("/v1/jobs/{job_id}", self.show)
        self.router.add_api_route("/v1/jobs/{job_id}/stream", self.stream)
        self.router.add_api_route("/v1/jobs/{job_id}", self.cancel, methods=["DELETE"], description=_CANCEL_DOC)
        self.router.add_api_route("/v1/jobs/{job_id}/ack", self.ack, methods=["POST"])

    async def list_jobs(self, request: Request) -> dict[str, Any]:
        """List the caller's jobs, newest first.

        `?limit=`, `?after=` (the `next` of the page before), `?state=` (several separated by commas), `?pool=`,
        `?priority=`, `?background=`, `?tag=`, `?submitted_after=` and `?submitted_before=` (Unix seconds). `?tenant=`
        needs the scope `admin`; `*` means all tenants.
        """
        params, caller = dict(request.query_params), caller_of(request)
        tenant = params.pop("tenant", caller.tenant)
        if tenant != caller.tenant or "infer" not in caller.scopes:
            caller.require("admin")
        after, limit = params.pop(AFTER, None), params.pop("limit", str(DEFAULT_PAGE_JOBS))
        wanted = JobFilter.of(params, tenant=None if tenant == ALL_TENANTS else tenant)
        # The reader of the list checks the range.
        number = int(limit) if limit.isdecimal() and len(limit) <= MAX_LIMIT_DIGITS else 0
        async with soon():
            page = await self._client.listed(wanted, after=after, limit=number)
        jobs = [job_object(status) | {"links": links_of(status.job_id)} for status in page.jobs]
        return {"object": "list", "data": jobs, "has_more": page.next_after is not None, "next": page.next_after}

    async def show(self, request: Request, job_id: str) -> Response:
        """Return a job's state, ledger and, once it has ended, its outcome and result."""
        async with soon():
            status = await self._client.status(job_id, tenant=caller_of(request).tenant)
        return JobAnswer(status, self._client, self._yielder, self._result_budget, timeout_s=self._timeout_s)

    async def stream(self, request: Request, job_id: str) -> Response:
        """Stream a job's chunks from the beginning, or after the chunk that `?after=` or `Last-Event-ID` names.

        A browser's EventSource repeats its URL with a newer header, so the header counts. Status 204 tells it to stop.
        With `?return_progress=true`, events without an id report queue position and prompt progress before that.
        """
        tenant = caller_of(request).tenant
        start = stream_start_of(request.headers.get(LAST_EVENT_HEADER) or request.query_params.get(AFTER))
        if start.index >= 0:
            status = await self._client.status(job_id, tenant=tenant)
            if status.outcome is not None and start.index >= status.num_chunks - 1:
                return Response(status_code=204)
        with_waiting = _truth_of(request, RETURN_PROGRESS)
        source = JobEvents(self._client, self._yielder, job_id, tenant, start, with_waiting=with_waiting)
        return self._answers.stream(source)

    async def ack(self, request: Request, job_id: str) -> dict[str, Any]:
        """Free the result of an ended job, because the caller has stored it. The job's state and usage stay for a day.

        `freed` is false for a job that is open, was acknowledged before, or is that of a stored response.
        """
        tenant = caller_of(request).tenant
        async with soon():
            status = await self._client.status(job_id, tenant=tenant)
        freed = await self._client.ack(job_id, tenant=tenant)
        return {"id": job_id, "object": "job", "state": status.state, "freed": bool(freed), "links": links_of(job_id)}

    async def cancel(self, request: Request, job_id: str) -> dict[str, Any]:
        state = await self._client.cancel(job_id, tenant=caller_of(request).tenant)
        return {"id": job_id, "object": "job", "state": state, "links": links_of(job_id)}


def _truth_of(request: Request, name: str) -> bool:
    text = request.query_params.get(name, "false")
    if text not in ("true", "false"):
        raise RequestError(f"{name} must be true or false", param=name)
    return text == "true"


def _routes(services: Services) -> list[Route | APIRouter]:
    submit = SubmitJob(services.client, services.reader, services.settings.max_logprobs)
    jobs = JobRoutes(services.client, services.settings, services.answers, services.yielder, services.result_budget)
    control = ControlRoutes(services.client, services.reader)
    # Their fixed paths go before the ids of jobs.
    return [Route("/v1/jobs", submit, methods=["POST"]), control.router, jobs.router]


JOBS = HttpDialect(_routes, bodies=(JobRequest,), socket_bodies={JOBS_PATH: JobRequest})
