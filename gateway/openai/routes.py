"""`POST /v1/completions` and `POST /v1/chat/completions`."""

from __future__ import annotations

from starlette.routing import Route

from penstock.gateway.generate import Generate
from penstock.gateway.openai.dialects import ChatDialect, CompletionDialect

ROUTES = (
    Route("/v1/completions", Generate("completion", CompletionDialect()), methods=["POST"]),
    Route("/v1/chat/completions", Generate("chat", ChatDialect()), methods=["POST"]),
)
