"""The ASGI app of `POST /v1/messages`."""

from __future__ import annotations

from dataclasses import replace

from fastapi import Request
from starlette.types import Receive, Scope, Send

from penstock.contract.errors import PromptTooLongError
from penstock.contract.job import MAX_TOKENS_LIMIT
from penstock.gateway.anthropic.dialect import MessagesDialect
from penstock.gateway.generate import answer_of
from penstock.gateway.request.parsing import generation_request_of, read_body
from penstock.gateway.stream.generation_request import GenerationRequest
from penstock.producer.client import AsyncClient
from penstock.producer.client.request import names_of


class GenerateMessage:
    """Answers with a message, whole or as a stream.

    Anthropic's `max_tokens` may exceed what the model's context leaves after the prompt; the answer then ends at the
    end of the context. Coding agents rely on it: they send one `max_tokens` for every model.
    """

    form = "messages"

    def __init__(self) -> None:
        self._dialect = MessagesDialect()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        request = Request(scope, receive, send)
        body = await read_body(request, self.form)
        generation = generation_request_of(request, body)
        if await self._exceeds_context(request, generation):
            generation = _up_to_context(generation)
        try:
            await answer_of(request, generation, body, self._dialect)(scope, receive, send)
        except PromptTooLongError as error:
            # An idempotency key already belongs to the refused job.
            if error.param != "max_tokens" or generation.idempotency_key is not None:
                raise
            await answer_of(request, _up_to_context(generation), body, self._dialect)(scope, receive, send)

    async def _exceeds_context(self, request: Request, generation: GenerationRequest) -> bool:
        """Return whether `max_tokens` is so large that no node can reach it, whatever the prompt."""
        content = generation.content
        client: AsyncClient = request.app.state.client
        records = (await client.pools()).values()
        fitting = [record for record in records if content.model in (*names_of(record), *record.adapters)]
        limits = [record.max_model_len or MAX_TOKENS_LIMIT for record in fitting]
        return bool(limits) and (content.params.max_tokens or 0) >= max(limits)


def _up_to_context(generation: GenerationRequest) -> GenerationRequest:
    """Return the request without `max_tokens`, which the rest of the context cannot hold."""
    content = generation.content
    return replace(generation, content=replace(content, params=content.params.model_copy(update={"max_tokens": None})))
