"""OpenAI's routes: completions, chats and the list of models."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.routing import Route

from penstock.gateway.apis.openai.encoder import ChatDialect, CompletionDialect
from penstock.gateway.apis.openai.schemas import ChatOfJob, ChatRequest, CompletionOfJob, CompletionRequest
from penstock.gateway.http.dialect import HttpDialect, JobBody, Services
from penstock.gateway.http.models import model_for, models_for
from penstock.gateway.route_doc import NUMBER, PROBE_METHODS, TEXT, RouteDoc, list_of, object_of
from penstock.gateway.stream.answer import Generate
from penstock.producer.client import AsyncClient

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
    completion_tokens_details=object_of(reasoning_tokens=NUMBER),
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


# `GET /v1/models` and `GET /v1/models/{id}`. Anthropic's API takes the requests that have its header.


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
        return {"object": "list", "data": await models_for(self._client, request)}

    async def retrieve_model(self, request: Request, model: str) -> dict[str, Any]:
        """Return one model. Its name may contain slashes."""
        return await model_for(self._client, request, model)


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
    job_bodies={"/v1/chat/completions": JobBody(ChatOfJob), "/v1/completions": JobBody(CompletionOfJob)},
)
