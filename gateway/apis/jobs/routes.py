"""The routes of the jobs API, except those of the feed of completions and of steering.

A caller sees only the jobs of its own tenant; others do not exist for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from penstock.contract.durability import TOKEN_DURABILITY, Durability, checked_durability
from penstock.contract.errors import InvariantError, PenstockError, RequestError, UnavailableError
from penstock.contract.job import RETURN_PROGRESS, SubmitOptions, lowered_max_tokens, pool_of
from penstock.contract.job_actions import JobFilter
from penstock.contract.pool import notice_of
from penstock.contract.problems import rename
from penstock.gateway.apis.jobs.answers import JobAnswer, JobEvents, links_of, stream_start_of
from penstock.gateway.apis.jobs.control import ALL_TENANTS, ControlRoutes
from penstock.gateway.apis.jobs.feed import FeedRoutes
from penstock.gateway.apis.jobs.job_log import JobLog, PresentReaders
from penstock.gateway.apis.jobs.log_reader import STREAM_HEADERS, LogReader, is_log_request
from penstock.gateway.apis.jobs.schemas import JobRequest
from penstock.gateway.apis.jobs.sets import SetRoutes
from penstock.gateway.budget import SharedBudget
from penstock.gateway.errors import error_body, soon
from penstock.gateway.http.dialect import Complete, HttpDialect, PrepareJob, Services
from penstock.gateway.http.middleware.request_forms import is_head
from penstock.gateway.metrics import GatewayMetrics
from penstock.gateway.request.encoding import JOBS_PATH, MAX_LIST_ITEMS, ListItem
from penstock.gateway.request.generation import GenerationRequest
from penstock.gateway.request.jobs import check_logprobs
from penstock.gateway.request.reading import (
    AFTER,
    LAST_EVENT_HEADER,
    MAX_KEY_CHARS,
    RequestReader,
    caller_of,
    idempotency_key_of,
)
from penstock.gateway.request_line import line_of_request
from penstock.gateway.route_doc import NUMBER, TEXT, RouteDoc, list_of, object_of
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.stream.answer import JOB_HEADER, MAX_TOKENS_HEADER, NOTICE_HEADER, Answers
from penstock.producer.client import AsyncClient
from penstock.producer.client.explanation import explain
from penstock.producer.client.job_objects import job_object, queue_members
from penstock.producer.client.many import SubmitRequest
from penstock.producer.client.request import Prompt
from penstock.producer.parsed_body import ParsedBody
from penstock.producer.text_bodies import pool_among
from penstock.queue.broker.producer import Submitted
from penstock.runtime.event_loop import LoopYielder

# `POST /v1/jobs`: submit one job or a list of jobs, and return their ids at once.

MULTI_STATUS = 207
"""The status of a list of which at least one job was refused."""
MAX_PREPARED = 32
"""Jobs of a list that are prepared and submitted together. Preparing them takes a few milliseconds."""


_ACCEPTED = object_of(id=TEXT, object=TEXT, state=TEXT, links=object_of(self=TEXT, stream=TEXT, cancel=TEXT, why=TEXT))
_REFUSED = object_of(status=NUMBER, error=object_of(message=TEXT, type=TEXT, code=TEXT))
_OUTCOME = {"oneOf": [object_of(status=NUMBER, **_ACCEPTED["properties"]), _REFUSED]}


class SubmitJob:
    """The ASGI app of `POST /v1/jobs`."""

    schema = JobRequest
    doc = RouteDoc(
        "Queue one job, or each job of a list, and return the ids at once.",
        _ACCEPTED,
        status=202,
        list_answer=object_of(object=TEXT, data=list_of(_OUTCOME)),
        list_status=MULTI_STATUS,
        max_list_items=MAX_LIST_ITEMS,
    )

    def __init__(
        self,
        client: AsyncClient,
        reader: RequestReader,
        complete: Mapping[str, Complete],
        max_logprobs: int,
        metrics: GatewayMetrics,
    ) -> None:
        """`complete`: by the `url` of a held body, what completes its request."""
        self._metrics = metrics
        self._client = client
        self._reader = reader
        self._complete = complete
        self._max_logprobs = max_logprobs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Queue one job and answer 202 with its id and links, or each job of a list and answer with their outcomes."""
        request = Request(scope, receive, send)
        async with self._reader.held_one_or_list(request, self.schema) as body:
            if isinstance(body, ParsedBody):
                answer = await self._answer_to(request, body)
            else:
                answer = await self._answer_to_list(request, body)
        await answer(scope, receive, send)

    async def _answer_to(self, request: Request, body: ParsedBody) -> Response:
        try:
            generation = self._reader.generation_of(request, body)
            prompt, options = await self.prepared(generation)
            submitted = await self._client.submit_unread(prompt, **options)
        except PenstockError as error:
            rename(error, body.names)
            raise
        answer = _accepted_object(submitted, body)
        if generation.shows_waiting:
            answer |= await self._waiting(submitted, generation.tenant)
        headers = {"Location": answer["links"]["self"], JOB_HEADER: submitted.job_id}
        if (limit := await self._lowered_limit(generation, pool_of(submitted.job_id))) is not None:
            headers[MAX_TOKENS_HEADER] = str(limit)
        with suppress(UnavailableError):
            record = (await self._client.pools()).get(pool_of(submitted.job_id))
            if notice := notice_of(record, generation.body.task):
                headers[NOTICE_HEADER] = notice
        return JSONResponse(answer, self.doc.status, headers)

    async def _answer_to_list(self, request: Request, items: Sequence[ListItem]) -> Response:
        key = idempotency_key_of(request)
        outcomes: list[dict[str, Any]] = []
        for at in range(0, len(items), MAX_PREPARED):
            outcomes += await self._outcomes_of(request, items[at : at + MAX_PREPARED], key, at)
        line_of_request().note_jobs([outcome["id"] for outcome in outcomes if "id" in outcome])
        all_accepted = all(outcome["status"] == self.doc.status for outcome in outcomes)
        return JSONResponse({"object": "list", "data": outcomes}, self.doc.status if all_accepted else MULTI_STATUS)

    async def _outcomes_of(
        self, request: Request, items: Sequence[ListItem], key: str | None, first: int
    ) -> list[dict[str, Any]]:
        """Submit some jobs of a list and return their outcomes. `first`: the number of the first one in the list."""
        bodies: list[ParsedBody | None] = []
        prepared: list[SubmitRequest | PenstockError] = []
        for number, item in enumerate(items, first):
            body = None
            try:
                body = item.parsed()
                has_own_key = key is None or body.queueing.get("idempotency_key") is not None
                own_key = None if has_own_key else f"{key}:{number}"
                generation = self._reader.generation_of(request, body).with_options(idempotency_key=own_key)
                prompt, options = await self.prepared(generation)
                prepared.append({"prompt": prompt, **options})
            except PenstockError as error:
                prepared.append(error)
            bodies.append(body)
        found = await self._client.submit_many_unread(prepared)
        return [self._outcome_of(*one) for one in zip(items, bodies, found, strict=True)]

    def _outcome_of(self, item: ListItem, body: ParsedBody | None, found: Submitted | PenstockError) -> dict[str, Any]:
        if isinstance(found, Submitted) and body is not None:
            return {"status": self.doc.status, **_accepted_object(found, body)}
        error = found if isinstance(found, PenstockError) else InvariantError("a job without a body was submitted")
        if body is not None:
            rename(error, body.names)
        self._metrics.refused(error)
        named = {} if item.custom_id is None else {"custom_id": item.custom_id}
        return {"status": error.status, **named, **error_body(error)}

    async def prepared(self, generation: GenerationRequest) -> tuple[Prompt, SubmitOptions]:
        """Return the prompt of a job and the options of its submission."""
        if (complete := self._complete.get(generation.body.options.get("url", ""))) is not None:
            generation = await complete(generation)
        body = generation.body
        if body.needs_token_details:
            pools, hides = (await self._client.pools()).values(), generation.hides_models
            record = pool_among(pools, body, body.model or None, hides_models=hides)
            check_logprobs(body, record, self._max_logprobs)
        options = generation.options_of(0)
        options["idempotency_key"] = _idempotency_key_of(generation)
        options["custom_id"] = body.options.get("custom_id")
        return body.prompts[0], options

    async def _waiting(self, submitted: Submitted, tenant: str) -> dict[str, int | str | None]:
        """Return the members of a queued job. If they cannot be read, there are none: the job is accepted."""
        with suppress(PenstockError):
            status = await self._client.status(submitted.job_id, tenant=tenant)
            if status.state == "queued":
                return queue_members(status)
        return {}

    async def _lowered_limit(self, generation: GenerationRequest, pool: str) -> int | None:
        """Return what the pool's context leaves of `max_tokens` at most, or None if it may leave all."""
        max_tokens = generation.body.params.max_tokens
        if not generation.lowers_max_tokens or max_tokens is None:
            return None
        record = (await self._client.pools()).get(pool)
        return None if record is None else lowered_max_tokens(max_tokens, record.max_model_len or None, 1)


def _accepted_object(submitted: Submitted, body: ParsedBody) -> dict[str, Any]:
    """Return the answer for an accepted job."""
    custom_id = body.options.get("custom_id")
    named = {} if custom_id is None else {"custom_id": custom_id}
    if submitted.channel is not None:
        named["channel"] = submitted.channel
    links = links_of(submitted.job_id)
    return {"id": submitted.job_id, "object": "job", "state": submitted.state, **named, "links": links}


def _idempotency_key_of(generation: GenerationRequest) -> str | None:
    """Return the key of the header or of the body. Raises RequestError if they differ, or for a wrong length."""
    in_header, in_body = generation.options.get("idempotency_key"), generation.body.queueing.get("idempotency_key")
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
        self._timeout_s, self._token_durability = settings.send_timeout_s, settings.token_durability
        self._answers = answers
        self._yielder = yielder
        self._result_budget = result_budget
        self._log_reader, self._present = LogReader(answers), PresentReaders()
        self.router = APIRouter()
        self.router.add_api_route("/v1/jobs", self.list_jobs)
        self.router.add_api_route("/v1/jobs/{job_id}", self.show)
        self.router.add_api_route("/v1/jobs/{job_id}/why", self.why)
        self.router.add_api_route("/v1/jobs/{job_id}/stream", self.stream)
        self.router.add_api_route("/v1/jobs/{job_id}", self.cancel, methods=["DELETE"], description=_CANCEL_DOC)
        self.router.add_api_route("/v1/jobs/{job_id}/ack", self.ack, methods=["POST"])

    async def list_jobs(self, request: Request) -> dict[str, Any]:
        """List the caller's jobs, newest first.

        `?limit=`, `?after=` (the `next` of the page before), `?state=` (several separated by commas), `?pool=`,
        `?priority=`, `?background=`, `?tag=`, `?custom_id=`, `?submitted_after=` and `?submitted_before=` (Unix
        seconds), and beside one of them `?metadata[NAME]=`. `?tenant=` needs the scope `admin`; `*` means all tenants.
        """
        params, caller = dict(request.query_params), caller_of(request)
        tenant = params.pop("tenant", caller.tenant)
        if tenant != caller.tenant or "infer" not in caller.scopes:
            caller.require("admin")
        after, limit = params.pop(AFTER, None), params.pop("limit", str(DEFAULT_PAGE_JOBS))
        members = {name[len("metadata[") : -1]: params.pop(name) for name in [*params] if _is_member(name)}
        wanted = JobFilter.of({**params, "metadata": members}, tenant=None if tenant == ALL_TENANTS else tenant)
        # The reader of the list checks the range.
        number = int(limit) if limit.isdecimal() and len(limit) <= MAX_LIMIT_DIGITS else 0
        async with soon():
            page = await self._client.listed(wanted, after=after, limit=number)
        jobs = []
        for status in page.jobs:
            # A key that looks at the jobs of other tenants sees no text of them.
            reads = status.tenant == caller.tenant and "infer" in caller.scopes
            jobs.append(job_object(status, shows_text=reads) | {"links": links_of(status.job_id)})
        has_more, now_ms = page.next_after is not None, round(1000 * self._client.servers.clock.now_s())
        return {"object": "list", "data": jobs, "has_more": has_more, "next": page.next_after, "now_ms": now_ms}

    async def show(self, request: Request, job_id: str) -> Response:
        """Return a job's state, ledger and, once it has ended, its outcome and result.

        With `?token_durability=fsync` or `replicated`, a result comes once Redis's disk, or a replica, has it.
        """
        durability = self._durability_of(request)
        async with soon():
            status = await self._client.status(job_id, tenant=caller_of(request).tenant)
        parts = self._client, self._yielder, self._result_budget
        return JobAnswer(status, *parts, timeout_s=self._timeout_s, token_durability=durability)

    async def why(self, request: Request, job_id: str) -> dict[str, Any]:
        """Explain a job: how long each part took and on which node, what it waits for, and what would help."""
        async with soon():
            return await explain(self._client, job_id, tenant=caller_of(request).tenant)

    async def stream(self, request: Request, job_id: str) -> Response:
        """Stream a job's chunks from the beginning, or after the chunk that `?after=` or `Last-Event-ID` names.

        A browser's EventSource repeats its URL with a newer header, so the header counts. Status 204 tells it to stop.
        With `?return_progress=true`, events without an id report queue position and prompt progress before that. With
        `?token_durability=fsync` or `replicated`, a chunk comes once Redis's disk, or a replica, has it.

        With `?offset=`, the answer is that of Durable Streams: a JSON array of the events' objects behind the offset,
        at once, or with `&live=long-poll` or `sse` also those that come. HEAD tells the end of the stream.
        """
        tenant, durability = caller_of(request).tenant, self._durability_of(request)
        only_looks = is_head(request.scope)
        if only_looks or is_log_request(request):
            present = None if only_looks else self._present
            log = JobLog(self._client, present, self._yielder, job_id, tenant, durability)
            return await self._log_reader.head(log) if only_looks else self._log_reader.read(request, log)
        start = stream_start_of(request.headers.get(LAST_EVENT_HEADER) or request.query_params.get(AFTER))
        if start.index >= 0:
            status = await self._client.status(job_id, tenant=tenant)
            if status.outcome is not None and start.index >= status.num_chunks - 1:
                return Response(status_code=204)
        with_waiting = _truth_of(request, RETURN_PROGRESS)
        reading = self._client, self._yielder, job_id, tenant, start
        source = JobEvents(*reading, with_waiting=with_waiting, token_durability=durability)
        return self._answers.stream(source)

    def _durability_of(self, request: Request) -> Durability | None:
        """Return what a read waits for. Raises RequestError for an unknown name."""
        asked = checked_durability(request.query_params.get(TOKEN_DURABILITY), TOKEN_DURABILITY)
        return asked or self._token_durability

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


def _submit_of(services: Services) -> SubmitJob:
    held = {url: body for api in services.apis for url, body in api.job_bodies.items()}
    complete = {url: body.complete(services) for url, body in held.items() if body.complete is not None}
    return SubmitJob(services.client, services.reader, complete, services.settings.max_logprobs, services.metrics)


def _is_member(name: str) -> bool:
    """Return whether a parameter names a member of metadata."""
    return name.startswith("metadata[") and name.endswith("]")


def _routes(services: Services) -> list[Route | APIRouter]:
    jobs = JobRoutes(services.client, services.settings, services.answers, services.yielder, services.result_budget)
    feed = FeedRoutes(services.client, services.answers, services.open_feeds, services.yielder, services.stopping)
    control = ControlRoutes(services.client, services.reader)
    # Their fixed paths go before the ids of jobs.
    submit = Route("/v1/jobs", _submit_of(services), methods=["POST"])
    return [submit, feed.router, control.router, SetRoutes(services.client.sets).router, jobs.router]


def _prepare_job(services: Services) -> PrepareJob:
    submit = _submit_of(services)

    async def prepared(request: Request, raw: bytes) -> tuple[Prompt, SubmitOptions]:
        body = await services.parser.parse(SubmitJob.schema, raw, caller_of(request).tenant)
        try:
            return await submit.prepared(services.reader.generation_of(request, body))
        except PenstockError as error:
            rename(error, body.names)
            raise

    return prepared


JOBS = HttpDialect(
    _routes,
    bodies=(JobRequest,),
    socket_bodies={JOBS_PATH: JobRequest},
    prepare_job=_prepare_job,
    exposed_headers=STREAM_HEADERS,
)
