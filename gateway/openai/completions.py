"""`POST /v1/completions`."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response

from penstock.gateway.openai.answer import StreamAnswer, WholeAnswer
from penstock.gateway.openai.door import IdempotencyKey, body_of, order_of
from penstock.gateway.openai.schemas import CompletionRequest
from penstock.producer.openai.render import CompletionRenderer

router = APIRouter()


@router.post("/v1/completions")
async def completions(
    request: Request,
    body: Annotated[CompletionRequest, Depends(body_of(CompletionRequest))],
    idempotency_key: IdempotencyKey = None,
) -> Response:
    """How one or several texts go on."""
    order = order_of(body, idempotency_key)
    if body.stream:
        return StreamAnswer(request, order, CompletionRenderer, include_usage=body.include_usage)
    return WholeAnswer(request, order, CompletionRenderer)
