"""The ASGI app of `POST /v1/messages/count_tokens`."""

from __future__ import annotations

import contextlib

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from penstock.gateway.prompt_counter import count_prompt_tokens
from penstock.gateway.request.parsing import generation_request_of, read_body
from penstock.gateway.stream.caller import CallerGoneError, until_disconnected, while_connected


class CountTokens:
    """Answers with the number of tokens of a conversation, its system prompt and its tools."""

    form = "count_tokens"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        request = Request(scope, receive, send)
        generation = generation_request_of(request, await read_body(request, self.form))

        async def answer() -> None:
            num_tokens = await count_prompt_tokens(request.app.state.client, generation)
            await JSONResponse({"input_tokens": num_tokens})(scope, receive, send)

        with contextlib.suppress(CallerGoneError):
            await while_connected(answer(), until_disconnected(receive))
