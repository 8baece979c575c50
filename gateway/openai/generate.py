"""`POST /v1/completions` and `POST /v1/chat/completions`."""

from __future__ import annotations

from fastapi import Request
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from penstock.gateway.openai.answer import Answer, StreamAnswer, WholeAnswer
from penstock.gateway.openai.request_parsing import generation_request_of, read_body
from penstock.producer.openai.render import ChatRenderer, CompletionRenderer, Renderer


class Generate:
    """The ASGI app of both routes. It bypasses FastAPI, whose call overhead is as large as this app's whole work."""

    def __init__(self, form: str, dialect: type[Renderer]) -> None:
        self._form = form
        self._dialect = dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        request = Request(scope, receive, send)
        await (await self._answer_to(request))(scope, receive, send)

    async def _answer_to(self, request: Request) -> Answer:
        body = await read_body(request, self._form)
        generation = generation_request_of(request, body)
        if body.stream:
            return StreamAnswer(request, generation, self._dialect, include_usage=body.include_usage)
        return WholeAnswer(request, generation, self._dialect)


ROUTES = (
    Route("/v1/completions", Generate("completion", CompletionRenderer), methods=["POST"]),
    Route("/v1/chat/completions", Generate("chat", ChatRenderer), methods=["POST"]),
)
