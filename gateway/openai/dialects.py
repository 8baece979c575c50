"""OpenAI's chats and completions as dialects of the gateway."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.contract.errors import PenstockError
from penstock.gateway.openai.errors import error_body
from penstock.gateway.openai.sse_encoder import OpenAIWholeEncoder, ParsedSseEncoder, SseEncoder
from penstock.gateway.stream.dialect import AnswerHead, Dialect, StreamEncoder, WholeEncoder
from penstock.gateway.stream.sse import event
from penstock.producer.openai.parsed_text import PLAIN
from penstock.producer.openai.render import ChatRenderer, CompletionRenderer, Renderer


class _OpenAIDialect(Dialect):
    renderer: type[Renderer]

    def needs_whole_log(self, options: Mapping[str, Any]) -> bool:
        """Return whether each event has the usage, since the first chunk alone knows the prompt's tokens."""
        return bool(options.get("continuous_usage_stats"))

    def stream(self, head: AnswerHead) -> StreamEncoder:
        """Return the cheapest encoder that can encode this answer."""
        renderer = self._renderer(head)
        if head.cut_at is not None and not head.replays:
            renderer.mark_resumed()
        needs_details = head.echoes or head.params.needs_token_details
        if head.form == PLAIN and not needs_details and not head.replays:
            return SseEncoder(renderer, head)
        return ParsedSseEncoder(renderer, head)

    def whole(self, head: AnswerHead) -> WholeEncoder:
        """Return the encoder of a whole answer."""
        return OpenAIWholeEncoder(self._renderer(head))

    def error_event(self, error: PenstockError) -> bytes:
        """Return the error as an event; the stream ends without [DONE] after it."""
        return event(error_body(error))

    def _renderer(self, head: AnswerHead) -> Renderer:
        renderer = self.renderer(
            job_id=head.job_ids[0],
            model=head.model,
            created_s=head.created_s,
            params=head.params,
            include_usage=bool(head.options.get("include_usage")),
            form=head.form,
            echoes=head.echoes,
            service_tier=head.options.get("service_tier"),
        )
        renderer.max_total_tokens = head.max_total_tokens
        return renderer


class ChatDialect(_OpenAIDialect):
    """Answers of `/v1/chat/completions`."""

    renderer = ChatRenderer


class CompletionDialect(_OpenAIDialect):
    """Answers of `/v1/completions`."""

    renderer = CompletionRenderer
    parses_text = False
