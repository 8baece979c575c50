"""The routes of the jobs API. A caller sees only the jobs of its own tenant; others do not exist for it."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from penstock.contract.errors import PenstockError, RequestError
from penstock.contract.job import RETURN_PROGRESS, is_job_id
from penstock.contract.output import TERMINAL_STATES
from penstock.contract.problems import rename
from penstock.gateway.errors import soon
from penstock.gateway.http.entry import caller_of
from penstock.gateway.jobs.answers import JobAnswer, JobStream, links_of, stream_start_of
from penstock.gateway.request.reading import AFTER, LAST_EVENT_HEADER, MAX_KEY_CHARS, generation_request_of, read_body
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.stream.answer import JOB_HEADER
from penstock.gateway.stream.generation_request import GenerationRequest, hiding_models, submit_options
from penstock.gateway.stream.limits import check_logprobs
from penstock.producer.client import AsyncClient
from penstock.producer.client.job_objects import job_object
from penstock.producer.client.request import choose_pool
from penstock.queue.broker.producer import Submitted

# `POST /v1/jobs`: submit a job and return its id at once.

FORM = "job"
"""Key of the body's schema in `parsed_body.BODIES`."""


class SubmitJob:
    """The ASGI app of `POST /v1/jobs`."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Queue one job and answer 202 with its id and links."""
        request = Request(scope, receive, send)
        body = await read_body(request, FORM)
        generation = generation_request_of(request, body)
        try:
            with hiding_models(generation):
                submitted = await _submit(request, generation)
        except PenstockError as error:
            rename(error, body.content.names)
            raise
        links = links_of(submitted.job_id)
        answer = {"id": submitted.job_id, "object": "job", "state": submitted.state, "links": links}
        headers = {"Location": links["self"], JOB_HEADER: submitted.job_id}
        await JSONResponse(answer, 202, headers)(scope, receive, send)


async def _submit(request: Request, generation: GenerationRequest) -> Submitted:
    client: AsyncClient = request.app.state.client
    settings: GatewaySettings = request.app.state.settings
    content = generation.content
    if content.needs_token_details:
        record = choose_pool((await client.pools()).values(), content.model or None)
        check_logprobs(content, record, settings.max_logprobs)
    options = submit_options(generation)
    options["idempotency_key"] = _idempotency_key_of(generation)
    return await client.submit_unread(content.prompts[0], **options)


def _idempotency_key_of(generation: GenerationRequest) -> str | None:
    """Return the key of the header or of the body. Raises RequestError if they differ, or for a wrong length."""
    in_header, in_body = generation.idempotency_key, generation.queueing.get("idempotency_key")
    if in_body is not None and not 1 <= len(in_body) <= MAX_KEY_CHARS:
        message = f"idempotency_key must have 1 to {MAX_KEY_CHARS} characters"
        raise RequestError(message, param="idempotency_key")
    if in_header is not None and in_body not in (None, in_header):
        raise RequestError("idempotency_key: differs from the header Idempotency-Key", param="idempotency_key")
    return in_header or in_body


DEFAULT_PAGE_JOBS = 20
MAX_POOL_CHARS = 69
MAX_LIMIT_DIGITS = 4
STATES = ("queued", "running", *sorted(TERMINAL_STATES))

ROUTES = (Route("/v1/jobs", SubmitJob(), methods=["POST"]),)
router = APIRouter()


@router.get("/v1/jobs")
async def list_jobs(request: Request) -> dict[str, Any]:
    """List the caller's jobs, newest first.

    `?limit=`, `?after=` (the `next` of the page before), `?state=`, `?pool=`; `?tenant=` needs the scope `admin`.
    """
    params = dict(request.query_params)
    caller, client = caller_of(request), _client_of(request)
    tenant = params.pop("tenant", caller.tenant)
    if tenant != caller.tenant or "infer" not in caller.scopes:
        caller.require("admin")
    pool, state = _pool_of(params.pop("pool", None)), _state_of(params.pop("state", None))
    limit, after = _limit_of(params.pop("limit", str(DEFAULT_PAGE_JOBS))), _cursor_of(params.pop(AFTER, None))
    if params:
        name = next(iter(params))[:64]
        raise RequestError(f"{name}: /v1/jobs accepts only limit, after, state, pool and tenant", param=name)
    async with soon():
        page = await client.jobs(tenant=tenant, pool=pool, state=state, limit=limit, after=after)
    jobs = [job_object(status) | {"links": links_of(status.job_id)} for status in page.jobs]
    return {"object": "list", "data": jobs, "has_more": page.next_after is not None, "next": page.next_after}


@router.get("/v1/jobs/{job_id}")
async def show(request: Request, job_id: str) -> Response:
    """Return a job's state, ledger and, once it has ended, its outcome and result."""
    async with soon():
        status = await _client_of(request).status(job_id, tenant=caller_of(request).tenant)
    return JobAnswer(request, status)


@router.get("/v1/jobs/{job_id}/stream")
async def stream(request: Request, job_id: str) -> Response:
    """Stream a job's chunks from the beginning, or after the chunk that `?after=` or `Last-Event-ID` names.

    A browser's EventSource repeats its URL with a newer header, so the header counts. Status 204 tells it to stop.
    With `?return_progress=true`, events without an id report queue position and prompt progress before that.
    """
    start = stream_start_of(request.headers.get(LAST_EVENT_HEADER) or request.query_params.get(AFTER))
    if start.index >= 0:
        status = await _client_of(request).status(job_id, tenant=caller_of(request).tenant)
        if status.outcome is not None and start.index >= status.num_chunks - 1:
            return Response(status_code=204)
    return JobStream(request, job_id, start, with_waiting=_truth_of(request, RETURN_PROGRESS))


@router.delete("/v1/jobs/{job_id}")
async def cancel(request: Request, job_id: str) -> dict[str, Any]:
    """Cancel a job. The state is `cancelled`, `running` (it ends within a step), or the state in which it had ended."""
    state = await _client_of(request).cancel(job_id, tenant=caller_of(request).tenant)
    return {"id": job_id, "object": "job", "state": state, "links": links_of(job_id)}


def _client_of(request: Request) -> AsyncClient:
    client: AsyncClient = request.app.state.client
    return client


def _limit_of(text: str) -> int:
    """Parse a limit. The reader of the list checks its range."""
    return int(text) if text.isdecimal() and len(text) <= MAX_LIMIT_DIGITS else 0


def _truth_of(request: Request, name: str) -> bool:
    text = request.query_params.get(name, "false")
    if text not in ("true", "false"):
        raise RequestError(f"{name} must be true or false", param=name)
    return text == "true"


def _pool_of(text: str | None) -> str | None:
    if text is not None and len(text) > MAX_POOL_CHARS:
        raise RequestError(f"pool must have at most {MAX_POOL_CHARS} characters", param="pool")
    return text


def _cursor_of(text: str | None) -> str | None:
    if text is not None and not is_job_id(text):
        raise RequestError("after must be the `next` of an earlier page, or a job's id", param=AFTER)
    return text


def _state_of(text: str | None) -> str | None:
    if text is not None and text not in STATES:
        raise RequestError(f"state must be one of {', '.join(STATES)}", param="state")
    return text
