"""Anthropic's routes: `/v1/messages`, `/v1/messages/count_tokens`, and its shape of the list of models."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from penstock.gateway.apis.anthropic.encoder import AnthropicErrors, MessagesDialect, names_version
from penstock.gateway.apis.anthropic.schemas import CountTokensRequest, MessagesRequest
from penstock.gateway.http.dialect import HttpDialect, RouteIf, Services
from penstock.gateway.http.models import model_for, models_for
from penstock.gateway.http.pages import ids_of_page, list_of
from penstock.gateway.request.jobs import count_prompt_tokens
from penstock.gateway.request.reading import RequestReader
from penstock.gateway.route_doc import RouteDoc
from penstock.gateway.stream.answer import Generate
from penstock.gateway.stream.event_stream import until_disconnected, while_connected
from penstock.gateway.stream.writer import CallerGoneError
from penstock.producer.client import AsyncClient

# The ASGI app of `POST /v1/messages/count_tokens`.


class CountTokens:
    """Answers with the number of tokens of a conversation, its system prompt and its tools."""

    schema = CountTokensRequest

    def __init__(self, client: AsyncClient, reader: RequestReader) -> None:
        self._client = client
        self._reader = reader

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        request = Request(scope, receive, send)
        generation = self._reader.generation_of(request, await self._reader.read(request, self.schema))

        async def answer() -> None:
            num_tokens = await count_prompt_tokens(self._client, generation)
            await JSONResponse({"input_tokens": num_tokens})(scope, receive, send)

        with contextlib.suppress(CallerGoneError):
            await while_connected(answer(), until_disconnected(receive))


# Anthropic's shape of the list of models, and its pages.


def model_of(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model in Anthropic's shape. `model` is one in OpenAI's shape."""
    created = datetime.fromtimestamp(model["created"], UTC)
    return {
        "type": "model",
        "id": model["id"],
        "display_name": model["id"],
        "created_at": created.strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def page_of(models: Sequence[Mapping[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """Return the page of models that `limit`, `after_id` and `before_id` of the query choose."""
    by_id = {model["id"]: model for model in models}
    ids, has_more = ids_of_page([*by_id], query, "model")
    return list_of([model_of(by_id[one]) for one in ids], has_more=has_more)


def _model_routes(client: AsyncClient) -> list[Route]:
    """Return the routes of the list of models, for requests with Anthropic's header."""

    async def list_models(request: Request) -> Response:
        return JSONResponse(page_of(await models_for(client, request), request.query_params))

    async def retrieve_model(request: Request) -> Response:
        return JSONResponse(model_of(await model_for(client, request, request.path_params["model"])))

    path = "/v1/models"
    return [RouteIf(path, list_models, names_version), RouteIf(f"{path}/{{model:path}}", retrieve_model, names_version)]


# `POST /v1/messages` and `POST /v1/messages/count_tokens`.


def _routes(services: Services) -> list[Route]:
    doc = RouteDoc("Answer with a message, whole or as a stream.")
    messages = Generate(MessagesRequest, MessagesDialect(), services.reader, services.answers, doc)
    count_tokens = CountTokens(services.client, services.reader)
    return [
        Route("/v1/messages", messages, methods=["POST"]),
        Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
        *_model_routes(services.client),
    ]


ANTHROPIC = HttpDialect(
    _routes,
    bodies=(MessagesRequest, CountTokensRequest),
    socket_bodies={"/v1/messages": MessagesRequest},
    errors=AnthropicErrors(),
)
