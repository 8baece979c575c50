"""From a request's bytes to a checked record, and from that to an order."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

from fastapi import Header, Request
from pydantic import ValidationError

from penstock.gateway.body import read_json_body
from penstock.gateway.openai.schemas import ChatRequest, CompletionRequest
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.stream.order import Order
from penstock.producer.openai.problems import request_error

_Body = TypeVar("_Body", ChatRequest, CompletionRequest)

IdempotencyKey = Annotated[str | None, Header(min_length=1, max_length=200)]
"""Shorter than a job's key may be: the prompt's number is added where there are several."""


def body_of(model: type[_Body]) -> Callable[[Request], Awaitable[_Body]]:
    """A dependency that reads and checks a body."""

    async def read(request: Request) -> _Body:
        settings: GatewaySettings = request.app.state.settings
        raw = await read_json_body(request, max_bytes=settings.max_body_bytes, timeout_s=settings.body_timeout_s)
        try:
            return model.model_validate_json(raw)
        except ValidationError as error:
            raise request_error(error) from None

    return read


def order_of(body: ChatRequest | CompletionRequest, idempotency_key: str | None) -> Order:
    """What the body asks of the queue."""
    try:
        params = body.params()
    except ValidationError as error:
        raise request_error(error) from None
    return Order(body.model, body.prompts(), params, body.job_priority, idempotency_key, body.prompt_field)
