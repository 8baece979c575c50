"""Anthropic's routes: `/v1/messages`, `/v1/messages/count_tokens`, and its shape of the list of models."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from penstock.contract.errors import RequestError
from penstock.gateway.apis.anthropic.encoder import AnthropicErrors, MessagesDialect
from penstock.gateway.apis.anthropic.schemas import CountTokensRequest, MessagesRequest
from penstock.gateway.http.dialect import HttpDialect, Services
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

DEFAULT_LIMIT = 20
MAX_LIMIT = 1000


def model_of(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model in Anthropic's shape. `model` is one in OpenAI's shape."""
    created = datetime.fromtimestamp(model["created"], UTC)
    return {
        "type": "model",
        "id": model["id"],
        "display_name": model["id"],
        "created_at": created.strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def ids_of_page(ids: Sequence[str], query: Mapping[str, str], what: str) -> tuple[Sequence[str], bool]:
    """Return the ids that `limit`, `after_id` and `before_id` of the query choose, and whether there are more.

    Raises RequestError. `what` names an object in the error for an unknown id.
    """
    limit, after, before = query.get("limit", str(DEFAULT_LIMIT)), query.get("after_id"), query.get("before_id")
    if not limit.isdecimal() or not 1 <= int(limit[:9]) <= MAX_LIMIT:
        raise RequestError(f"limit: must be a number from 1 to {MAX_LIMIT}", param="limit")
    if after is not None and before is not None:
        raise RequestError("before_id: conflicts with after_id; send one of them", param="before_id")
    for name, given in (("after_id", after), ("before_id", before)):
        if given is not None and given not in ids:
            raise RequestError(f"{name}: there is no {what} {given[:256]!r}", param=name)
    if before is not None:
        rest = ids[: ids.index(before)]
        page = rest[-int(limit) :]
    else:
        rest = ids if after is None else ids[ids.index(after) + 1 :]
        page = rest[: int(limit)]
    return page, len(page) < len(rest)


def list_of(objects: Sequence[Mapping[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """Return Anthropic's list object of a page."""
    ends = (objects[0]["id"], objects[-1]["id"]) if objects else (None, None)
    return {"data": objects, "has_more": has_more, "first_id": ends[0], "last_id": ends[1]}


def page_of(models: Sequence[Mapping[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """Return the page of models that `limit`, `after_id` and `before_id` of the query choose."""
    by_id = {model["id"]: model for model in models}
    ids, has_more = ids_of_page([*by_id], query, "model")
    return list_of([model_of(by_id[one]) for one in ids], has_more=has_more)


# `POST /v1/messages` and `POST /v1/messages/count_tokens`.


def _routes(services: Services) -> list[Route]:
    doc = RouteDoc("Answer with a message, whole or as a stream.")
    messages = Generate(MessagesRequest, MessagesDialect(), services.reader, services.answers, doc)
    count_tokens = CountTokens(services.client, services.reader)
    return [
        Route("/v1/messages", messages, methods=["POST"]),
        Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
    ]


ANTHROPIC = HttpDialect(
    _routes,
    bodies=(MessagesRequest, CountTokensRequest),
    socket_bodies={"/v1/messages": MessagesRequest},
    errors=AnthropicErrors(),
)
