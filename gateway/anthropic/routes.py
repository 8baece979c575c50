"""`POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

from starlette.routing import Route

from penstock.gateway.anthropic.count_tokens import CountTokens
from penstock.gateway.anthropic.dialect import MessagesDialect
from penstock.gateway.generate import Generate
from penstock.gateway.route_doc import RouteDoc

ROUTES = (
    Route(
        "/v1/messages",
        Generate("messages", MessagesDialect(), RouteDoc("Answer with a message, whole or as a stream.")),
        methods=["POST"],
    ),
    Route("/v1/messages/count_tokens", CountTokens(), methods=["POST"]),
)
