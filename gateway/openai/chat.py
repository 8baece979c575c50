"""`POST /v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response

from penstock.gateway.openai.answer import StreamAnswer, WholeAnswer
from penstock.gateway.openai.door import IdempotencyKey, body_of, order_of
from penstock.gateway.openai.schemas import ChatRequest
from penstock.producer.openai.render import ChatRenderer

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat_completions(
    request: Request,
    body: Annotated[ChatRequest, Depends(body_of(ChatRequest))],
    idempotency_key: IdempotencyKey = None,
) -> Response:
    """The next turn of a conversation."""
    order = order_of(body, idempotency_key)
    if body.stream:
        return StreamAnswer(request, order, ChatRenderer, include_usage=body.include_usage)
    return WholeAnswer(request, order, ChatRenderer)
