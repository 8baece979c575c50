"""OpenAI's routes: completions, chats and the list of models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request
from starlette.routing import Route

from penstock.contract.errors import NotFoundError
from penstock.gateway.apis.anthropic import routes as anthropic_models
from penstock.gateway.apis.anthropic.encoder import names_version
from penstock.gateway.apis.openai.encoder import ChatDialect, CompletionDialect
from penstock.gateway.apis.openai.schemas import ChatRequest, CompletionRequest
from penstock.gateway.errors import soon
from penstock.gateway.http.dialect import HttpDialect, Services
from penstock.gateway.request.reading import caller_of
from penstock.gateway.route_doc import NUMBER, PROBE_METHODS, TEXT, RouteDoc, list_of, object_of
from penstock.gateway.stream.answer import Generate
from penstock.producer.client import AsyncClient
from penstock.queue.broker.producer import ServedPool

# JSON schemas of the answers of chats and completions, for the OpenAPI document.
#
# `producer/openai/render.py` renders these answers without pydantic.


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


def _with_optional(schema: dict[str, Any], **properties: Any) -> dict[str, Any]:
    return {**schema, "properties": schema["properties"] | properties}


_CALL = object_of(id=TEXT, type={"const": "function"}, function=object_of(name=TEXT, arguments=TEXT))
_USAGE = object_of(
    prompt_tokens=NUMBER,
    completion_tokens=NUMBER,
    total_tokens=NUMBER,
    prompt_tokens_details=object_of(cached_tokens=NUMBER),
)
_MESSAGE = _with_optional(
    object_of(role={"const": "assistant"}, content=_or_null(TEXT)),
    tool_calls=list_of(_CALL),
    reasoning_content=TEXT,
    refusal={"type": "null"},
)
_DELTA = {
    "type": "object",
    "properties": {
        "role": {"const": "assistant"},
        "content": TEXT,
        "reasoning_content": TEXT,
        # Only the first part of a call has its id, type and name.
        "tool_calls": list_of(
            _with_optional(
                object_of(index=NUMBER, function=_with_optional(object_of(arguments=TEXT), name=TEXT)),
                id=TEXT,
                type={"const": "function"},
            )
        ),
    },
}


def _choice(**fields: Any) -> dict[str, Any]:
    reason = {"enum": ["stop", "length", "tool_calls", None]}
    whole = object_of(index=NUMBER, finish_reason=reason, logprobs=_or_null({"type": "object"}), **fields)
    return _with_optional(whole, prompt_logprobs={"type": "array"}, warnings=list_of(TEXT))


def _answer(kind: str, choice: dict[str, Any]) -> dict[str, Any]:
    head = object_of(id=TEXT, object={"const": kind}, created=NUMBER, model=TEXT, choices=list_of(choice))
    return _with_optional(head, usage=_or_null(_USAGE))


CHAT_DOC = RouteDoc(
    "Continue a chat.",
    _answer("chat.completion", _choice(message=_MESSAGE)),
    _answer("chat.completion.chunk", _choice(delta=_DELTA)),
)
COMPLETION_DOC = RouteDoc(
    "Continue one or several texts.",
    _answer("text_completion", _choice(text=TEXT)),
    _answer("text_completion", _choice(text=TEXT)),
)


# `GET /v1/models` and `GET /v1/models/{id}`, which Anthropic's API has too.


class ModelRoutes:
    """The routes of the list of models."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self.router = APIRouter()
        self.router.add_api_route("/v1/models", self.list_models, methods=PROBE_METHODS)
        self.router.add_api_route("/v1/models/{model:path}", self.retrieve_model, methods=PROBE_METHODS)

    async def list_models(self, request: Request) -> dict[str, Any]:
        """List the models that live nodes serve, under each of their names, and their adapters.

        With the header `anthropic-version`, the list has Anthropic's shape.
        """
        async with soon():
            models = _models(await self._client.pools())
        seen = [one for name, one in models.items() if caller_of(request).sees(name)]
        if names_version(request.scope):
            return anthropic_models.page_of(seen, request.query_params)
        return {"object": "list", "data": seen}

    async def retrieve_model(self, request: Request, model: str) -> dict[str, Any]:
        """Return one model. Its name may contain slashes."""
        async with soon():
            models = _models(await self._client.pools())
            if model not in models:
                # The model's first node may have joined after the pools were cached.
                models = _models(await self._client.pools(renewed=True))
        if model not in models or not caller_of(request).sees(model):
            raise NotFoundError(f"no model {model[:256]!r} is served", code="model_not_found", param="model")
        found = models[model]
        return anthropic_models.model_of(found) if names_version(request.scope) else found


def _models(pools: Mapping[str, ServedPool]) -> dict[str, dict[str, Any]]:
    """Return the models by name, then the adapters, because many programs take the first one."""
    models: dict[str, dict[str, Any]] = {}
    for record in pools.values():
        if not record.is_alive:
            continue
        models |= {name: _model(name, record) for name in (record.model, *record.aliases)}
    adapters = {
        name: _model(name, record) | {"parent": record.model}
        for record in pools.values()
        if record.is_alive
        for name in record.adapters
        if name not in models
    }
    return models | adapters


def _model(name: str, record: ServedPool) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": record.created_s,
        "owned_by": "penstock",
        "root": record.model,
        "max_model_len": record.max_model_len,
        "capabilities": record.capabilities,
    }


# `POST /v1/completions` and `POST /v1/chat/completions`.


def _routes(services: Services) -> list[Route | APIRouter]:
    reader, answers = services.reader, services.answers
    completions = Generate(CompletionRequest, CompletionDialect(), reader, answers, COMPLETION_DOC)
    chats = Generate(ChatRequest, ChatDialect(), reader, answers, CHAT_DOC)
    return [
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chats, methods=["POST"]),
        ModelRoutes(services.client).router,
    ]


OPENAI = HttpDialect(
    _routes,
    bodies=(ChatRequest, CompletionRequest),
    socket_bodies={"/v1/chat/completions": ChatRequest, "/v1/completions": CompletionRequest},
)
