"""`POST /v1/completions` and `POST /v1/chat/completions`."""

from __future__ import annotations

from fastapi import Request
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from penstock.gateway.openai.answer import Answer, StreamAnswer, WholeAnswer
from penstock.gateway.openai.request_parsing import order_of, read_body
from penstock.producer.openai.render import ChatRenderer, CompletionRenderer, Renderer


class Generate:
    """What both routes do. A bare ASGI app, since FastAPI's way to a function takes as long as all that it would do."""

    def __init__(self, form: str, dialect: type[Renderer]) -> None:
        self._form = form
        self._dialect = dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers."""
        request = Request(scope, receive, send)
        await (await self._answer_to(request))(scope, receive, send)

    async def _answer_to(self, request: Request) -> Answer:
        asked = await read_body(request, self._form)
        order = order_of(request, asked)
        if asked.stream:
            return StreamAnswer(request, order, self._dialect, include_usage=asked.include_usage)
        return WholeAnswer(request, order, self._dialect)


ROUTES = (
    Route("/v1/completions", Generate("completion", CompletionRenderer), methods=["POST"]),
    Route("/v1/chat/completions", Generate("chat", ChatRenderer), methods=["POST"]),
)
