"""From a request's bytes to a checked record, and from that to an order."""

from __future__ import annotations

from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from penstock.contract.api_keys import ApiKey
from penstock.contract.errors import RequestError
from penstock.contract.job import is_job_id
from penstock.contract.problems import request_error
from penstock.contract.rights import allowed_class
from penstock.gateway.body import read_json_body
from penstock.gateway.entry import caller_of
from penstock.gateway.openai.schemas import ChatRequest, CompletionRequest
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.stream.order import Order, Place

_Body = TypeVar("_Body", bound=BaseModel)

KEY_HEADER = "idempotency-key"
MAX_KEY_CHARS = 200
"""Shorter than a job's key may be: the prompt's number is added where there are several."""
AFTER = "after"
PLACE_HEADER = "last-event-id"
"""What browsers call it. Either comes with the body as it was sent before; the stream goes on behind that event."""
MAX_NUMBER_DIGITS = 9


async def read_body(request: Request, model: type[_Body]) -> _Body:
    """The request's body, checked."""
    settings: GatewaySettings = request.app.state.settings
    raw = await read_json_body(request, max_bytes=settings.max_body_bytes, timeout_s=settings.body_timeout_s)
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        raise request_error(error) from None


def idempotency_key_of(request: Request) -> str | None:
    """The key under which the caller may ask again."""
    key = request.headers.get(KEY_HEADER)
    if key is not None and not 1 <= len(key) <= MAX_KEY_CHARS:
        raise RequestError(f"Idempotency-Key must have 1 to {MAX_KEY_CHARS} characters", param=KEY_HEADER)
    return key


def place_of(request: Request, body: ChatRequest | CompletionRequest) -> Place | None:
    """Where the caller's stream was cut: the id of the last event that arrived, None for a new request."""
    said = request.query_params.get(AFTER) or request.headers.get(PLACE_HEADER)
    if not said:
        return None
    job_id, *numbers = said.rsplit(":", 2)
    if not is_job_id(job_id) or len(numbers) != 2 or not all(map(_is_number, numbers)):
        raise RequestError("not the id of an event of ours, which is <job>:<chunk>:<tokens>", param=AFTER)
    if not body.stream or len(body.prompts()) != 1:
        raise RequestError("only a stream of one prompt goes on where it was cut", param=AFTER)
    return Place(job_id, *map(int, numbers))


def _is_number(text: str) -> bool:
    return text.isdecimal() and len(text) <= MAX_NUMBER_DIGITS


def _limit_of(caller: ApiKey) -> str:
    return "this API key" if caller.key_id else "this gateway while it has no API keys (open_highest_class)"


def order_of(request: Request, body: ChatRequest | CompletionRequest) -> Order:
    """What the caller asks of the queue."""
    caller, idempotency_key = caller_of(request), idempotency_key_of(request)
    try:
        params = body.params()
    except ValidationError as error:
        raise request_error(error, body.names()) from None
    return Order(
        body.model,
        body.prompts(),
        params,
        allowed_class(body.priority, caller.highest_class, _limit_of(caller)),
        tenant=caller.tenant,
        terms=caller.metered_terms,
        idempotency_key=idempotency_key,
        cut_at=place_of(request, body),
        names=body.names(),
        tool_use=body.tool_use(),
        echoes=body.echoes,
    )
