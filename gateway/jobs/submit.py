"""`POST /v1/jobs`: submit a job and return its id at once."""

from __future__ import annotations

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from penstock.contract.errors import PenstockError, RequestError
from penstock.contract.problems import rename
from penstock.gateway.jobs.answer import links_of
from penstock.gateway.request.parsed_body import ParsedBody
from penstock.gateway.request.parsing import MAX_KEY_CHARS, generation_request_of, read_body
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.stream.answer import JOB_HEADER
from penstock.gateway.stream.generation_request import GenerationRequest, hiding_models, submit_options
from penstock.gateway.stream.limits import check_logprobs
from penstock.producer.client import AsyncClient
from penstock.producer.client.request import choose_pool
from penstock.queue.broker.producer import Submitted

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
                submitted = await _submit(request, body, generation)
        except PenstockError as error:
            rename(error, body.content.names)
            raise
        links = links_of(submitted.job_id)
        answer = {"id": submitted.job_id, "object": "job", "state": submitted.state, "links": links}
        headers = {"Location": links["self"], JOB_HEADER: submitted.job_id}
        await JSONResponse(answer, 202, headers)(scope, receive, send)


async def _submit(request: Request, body: ParsedBody, generation: GenerationRequest) -> Submitted:
    client: AsyncClient = request.app.state.client
    settings: GatewaySettings = request.app.state.settings
    content = generation.content
    if content.needs_token_details:
        record = choose_pool((await client.pools()).values(), content.model or None)
        check_logprobs(content, record, settings.max_logprobs)
    options = submit_options(generation)
    options["background"] = body.options["background"]
    options["queue_without_node"] = body.options["queue_without_node"]
    options["idempotency_key"] = _idempotency_key_of(body, generation)
    return await client.submit_unread(content.prompts[0], **options)


def _idempotency_key_of(body: ParsedBody, generation: GenerationRequest) -> str | None:
    """Return the key of the header or of the body. Raises RequestError if they differ, or for a wrong length."""
    in_header, in_body = generation.idempotency_key, body.options["idempotency_key"]
    if in_body is not None and not 1 <= len(in_body) <= MAX_KEY_CHARS:
        message = f"idempotency_key must have 1 to {MAX_KEY_CHARS} characters"
        raise RequestError(message, param="idempotency_key")
    if in_header is not None and in_body not in (None, in_header):
        raise RequestError("idempotency_key: differs from the header Idempotency-Key", param="idempotency_key")
    return in_header or in_body
