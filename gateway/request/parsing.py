"""Parsing of an HTTP request: from bytes to a checked body, and from the body to a GenerationRequest."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from fastapi import Request

from penstock.contract.api_keys import ApiKey
from penstock.contract.errors import PenstockError, RequestError
from penstock.contract.job import is_job_id
from penstock.contract.priority import allowed_class
from penstock.gateway.authentication import caller_of
from penstock.gateway.request.body import read_json_body
from penstock.gateway.request.body_parser import Parser
from penstock.gateway.request.parsed_body import ParsedBody
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.shared_budget import SharedBudget
from penstock.gateway.stream.generation_request import FIRST_OF_TWO, GenerationRequest, StreamPosition

KEY_HEADER = "idempotency-key"
MAX_KEY_CHARS = 200
"""Longest idempotency key in characters. A job's key may be longer, because it adds the number of the prompt."""
AFTER = "after"
LAST_EVENT_HEADER = "last-event-id"
"""Query parameter and browser header with the id of the last received event. The caller sends either one with the same
body as before, and the stream continues after that event."""
MAX_NUMBER_DIGITS = 9
EVENT_IDS_HEADER = "x-penstock-event-ids"
"""Request header that asks for event ids: "true" or "false". `stream_options.include_event_ids` precedes it."""
EVENT_IDS_OPTION = "include_event_ids"
PARSED_BODY = "penstock.parsed_body"
"""ASGI extension with the body of a WebSocket's request: a ParsedBody, or the error to raise."""
_TRUTH = {"true": True, "false": False}


async def read_body(request: Request, form: str) -> ParsedBody:
    """Read and check the request's body. `form` is a key of `parsed_body.BODIES`.

    The body of a message has been parsed with the message.
    """
    async with held_body(request, form) as body:
        return body


@asynccontextmanager
async def held_body(request: Request, form: str) -> AsyncIterator[ParsedBody]:
    """Read a body as `read_body` does, and keep the memory that was claimed for it in the block."""
    # Remove it from the scope, which would otherwise keep it in memory until the end of the answer.
    parsed: ParsedBody | PenstockError | None = request.scope.get("extensions", {}).pop(PARSED_BODY, None)
    if isinstance(parsed, PenstockError):
        raise parsed
    if parsed is not None:
        yield parsed
        return
    state, owner = request.app.state, caller_of(request).tenant
    settings: GatewaySettings = state.settings
    budget: SharedBudget = state.body_budget
    parser: Parser = state.parser
    async with budget.taken(owner) as claim:
        max_bytes, timeout_s = settings.max_body_bytes, settings.body_timeout_s
        raw = await read_json_body(request, claim, max_bytes=max_bytes, timeout_s=timeout_s)
        parsed = await parser.parse(form, raw, owner)
        del raw
        yield parsed


def idempotency_key_of(request: Request) -> str | None:
    """Return the caller's idempotency key, or None. Raises RequestError for a key of the wrong length."""
    key = request.headers.get(KEY_HEADER)
    if key is not None and not 1 <= len(key) <= MAX_KEY_CHARS:
        raise RequestError(f"Idempotency-Key must have 1 to {MAX_KEY_CHARS} characters", param=KEY_HEADER)
    return key


def stream_position_of(request: Request, body: ParsedBody) -> StreamPosition | None:
    """Return the position after which to resume the caller's stream, or None for a new request.

    Raises RequestError for an invalid event id, and for a request that cannot be resumed.
    """
    event_id = request.query_params.get(AFTER) or request.headers.get(LAST_EVENT_HEADER)
    if not event_id:
        return None
    job_id, *numbers = event_id.removesuffix(FIRST_OF_TWO).split(":")
    if not is_job_id(job_id) or len(numbers) != 2 or not all(map(_is_number, numbers)):
        raise RequestError("after: an event id has the form <job>:<chunk>:<tokens>", param=AFTER)
    if not body.stream or len(body.content.prompts) != 1:
        raise RequestError("after: only a streaming request with one prompt can be resumed", param=AFTER)
    index, num_tokens = map(int, numbers)
    return StreamPosition(job_id, index, num_tokens, lacks_end=event_id.endswith(FIRST_OF_TWO))


def _wants_event_ids(request: Request, body: ParsedBody, *, may_resume: bool) -> bool:
    """Return whether the events of the answer have ids. `may_resume`: the request shows that its caller resumes."""
    wanted = body.options.get(EVENT_IDS_OPTION)
    if wanted is not None:
        return bool(wanted)
    header = request.headers.get(EVENT_IDS_HEADER)
    if header is None:
        return may_resume
    if header.lower() not in _TRUTH:
        raise RequestError("X-Penstock-Event-Ids must be true or false", param=EVENT_IDS_HEADER)
    return _TRUTH[header.lower()]


def _is_number(text: str) -> bool:
    return text.isdecimal() and len(text) <= MAX_NUMBER_DIGITS


def _limit_of(caller: ApiKey) -> str:
    return "this API key" if caller.key_id else "this gateway while it has no API keys (open_highest_class)"


def generation_request_of(request: Request, body: ParsedBody) -> GenerationRequest:
    """Combine the caller, the headers and the body into one GenerationRequest.

    Raises RequestError for invalid headers and ForbiddenError for a priority class above the caller's.
    """
    caller, settings = caller_of(request), request.app.state.settings
    content = replace(body.content, model=caller.model_of(body.content.model)) if caller.models else body.content
    key, cut_at = idempotency_key_of(request), stream_position_of(request, body)
    return GenerationRequest(
        content,
        allowed_class(body.priority, caller.highest_class, _limit_of(caller)),
        tenant=caller.tenant,
        terms=caller.metered_terms,
        idempotency_key=key,
        deadline_s=body.options.get("deadline_s"),
        not_before_s=body.options.get("not_before_s"),
        lowers_max_tokens=settings.max_tokens_beyond_context == "lower",
        return_progress=body.options.get("return_progress", False),
        cut_at=cut_at,
        event_ids=_wants_event_ids(request, body, may_resume=key is not None or cut_at is not None),
        hides_models=bool(caller.models),
    )
