"""`POST /v1/completions` and `POST /v1/chat/completions`."""

from __future__ import annotations

from starlette.routing import Route

from penstock.gateway.generate import Generate
from penstock.gateway.openai.answer_schemas import CHAT_DOC, COMPLETION_DOC
from penstock.gateway.openai.dialects import ChatDialect, CompletionDialect

ROUTES = (
    Route("/v1/completions", Generate("completion", CompletionDialect(), COMPLETION_DOC), methods=["POST"]),
    Route("/v1/chat/completions", Generate("chat", ChatDialect(), CHAT_DOC), methods=["POST"]),
)
