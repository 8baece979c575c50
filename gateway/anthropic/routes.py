"""`POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

from starlette.routing import Route

from penstock.gateway.anthropic.count_tokens import CountTokens
from penstock.gateway.anthropic.generate import GenerateMessage

ROUTES = (
    Route("/v1/messages", GenerateMessage(), methods=["POST"]),
    Route("/v1/messages/count_tokens", CountTokens(), methods=["POST"]),
)
