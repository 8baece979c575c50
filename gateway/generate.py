"""The ASGI app of a route whose requests become jobs, in any dialect."""

from __future__ import annotations

from fastapi import Request
from starlette.types import Receive, Scope, Send

from penstock.gateway.request.parsed_body import ParsedBody
from penstock.gateway.request.parsing import generation_request_of, read_body
from penstock.gateway.route_doc import RouteDoc
from penstock.gateway.stream.answer import Answer, StreamAnswer, WholeAnswer
from penstock.gateway.stream.dialect import Dialect
from penstock.gateway.stream.generation_request import GenerationRequest


class Generate:
    """The ASGI app of one such route. It bypasses FastAPI: a call of FastAPI costs as much as the whole work here."""

    def __init__(self, form: str, dialect: Dialect, doc: RouteDoc | None = None) -> None:
        """`form` is a key of `parsed_body.BODIES`. `doc` describes the route in the OpenAPI document."""
        self.form = form
        self.doc = doc or RouteDoc()
        self._dialect = dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        request = Request(scope, receive, send)
        await (await self._answer_to(request))(scope, receive, send)

    async def _answer_to(self, request: Request) -> Answer:
        body = await read_body(request, self.form)
        return answer_of(request, generation_request_of(request, body), body, self._dialect)


def answer_of(request: Request, generation: GenerationRequest, body: ParsedBody, dialect: Dialect) -> Answer:
    """Return the answer that the body asks for, streamed or whole."""
    form = StreamAnswer if body.stream else WholeAnswer
    return form(request, generation, dialect, body.options, body.ignored)
