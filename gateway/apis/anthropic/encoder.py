"""Anthropic's messages as a dialect of the gateway: token chunks as typed events, whole answers as JSON, and errors."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from http import HTTPStatus
from typing import Any, Literal

from fastapi.responses import JSONResponse
from pydantic_core import to_json
from starlette.datastructures import Headers
from starlette.types import Scope

from penstock.contract.calls.reading import Call
from penstock.contract.errors import PenstockError, RequestError
from penstock.contract.output import Chunk, FinishReason, Usage
from penstock.gateway.errors import ID_HEADER as COMMON_ID_HEADER
from penstock.gateway.errors import ErrorShape, retry_headers
from penstock.gateway.request.earlier_reasoning import (
    SEAL,
    SealTerms,
    may_reason,
    seal_terms_of,
    without_foreign_reasoning,
)
from penstock.gateway.request.generation import GenerationRequest
from penstock.gateway.stream.dialect import AnswerHead, ChunkEncoder, Dialect, StreamEncoder, WholeEncoder
from penstock.gateway.stream.writer import error_event
from penstock.producer.anthropic.bodies import SHOWS_THINKING
from penstock.producer.anthropic.message import (
    WholeMessage,
    error_body,
    message_of,
    message_of_error,
    status_of,
    stop_of,
    tool_use_block,
    usage_of,
    warning_member,
    whole_usage_of,
    without_stop,
)
from penstock.producer.client import AsyncClient
from penstock.producer.openai.render import is_cut
from penstock.producer.openai.seals import THOUGHTS, signature
from penstock.producer.parsing.parsed_text import PLAIN, AnswerReader, ParsedText
from penstock.queue.results import PackedResult

# Errors in Anthropic's shape, with its types and status codes.

ID_HEADER = "request-id"
"""Response header with the request's id in the access log. Anthropic's client shows it in its errors."""
VERSION_HEADER = "anthropic-version"
_NO_THREADS = "thread_unsupported_request"
"""Anthropic's code for a refused `thread`. Its client then sends the whole conversation instead."""


def names_version(scope: Scope) -> bool:
    """Return whether Anthropic's client sent a request to a path that several APIs have, such as `/v1/models`."""
    return VERSION_HEADER in Headers(scope=scope)


class AnthropicErrors(ErrorShape):
    """Anthropic's shape of errors."""

    paths = ("/v1/messages",)
    id_headers = (COMMON_ID_HEADER, ID_HEADER)
    event_name = b"error"

    def is_for(self, scope: Scope) -> bool:
        """Return whether the answer to a request has Anthropic's shape."""
        path = scope["path"]
        is_models_path = path == "/v1/models" or path.startswith("/v1/models/")
        return self.has_path(path) or (is_models_path and names_version(scope))

    def response(self, error: PenstockError, request_id: str | None) -> JSONResponse:
        """Return the HTTP response for an error."""
        status = status_of(error)
        body = error_body(message_of_error(error), status, request_id)
        if error.param == "thread":
            body["error"]["details"] = {"error_code": _NO_THREADS}
        return JSONResponse(body, status, retry_headers(error))

    def framework_body(self, message: str, status: int, request_id: str | None) -> dict[str, Any]:
        """Return the body for an error of the web framework."""
        return error_body(message, status, request_id)

    def bug_body(self, request_id: str | None) -> dict[str, Any]:
        """Return the body for a bug in penstock."""
        return error_body("internal error", HTTPStatus.INTERNAL_SERVER_ERROR, request_id)

    def event_payload(self, error: PenstockError) -> dict[str, Any]:
        """Return the data of the event that ends a failed stream."""
        body = error_body(message_of_error(error), status_of(error), None)
        return {"type": body["type"], "error": body["error"]}


def event(payload: Mapping[str, Any]) -> bytes:
    """Encode one event; its name is the payload's `type`. It is ASCII, because some readers split at U+2028."""
    return b"event: %b\ndata: %b\n\n" % (str(payload["type"]).encode(), to_json(payload, ensure_ascii=True))


# The events of a streamed Anthropic message, and the state of its content blocks.

_BlockType = Literal["text", "thinking", "tool_use"]
_DELTA = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":'
_DELTAS = {
    "text": _DELTA + b'"text_delta","text":%b}}\n\n',
    "thinking": _DELTA + b'"thinking_delta","thinking":%b}}\n\n',
    "tool_use": _DELTA + b'"input_json_delta","partial_json":%b}}\n\n',
}
_STARTS: dict[_BlockType, dict[str, Any]] = {
    "text": {"type": "text", "text": ""},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}


PING = event({"type": "ping"})


class BlockEvents:
    """Writes the content blocks of one answer as events. At most one block is open."""

    def __init__(self, job_id: str, *, shows_thinking: bool, seal: SealTerms | None = None) -> None:
        """`seal`: how thinking is signed; None: its signature is empty."""
        self._job_id = job_id
        self._shows_thinking = shows_thinking
        self._seal = seal
        self._thought = hashlib.sha256()
        self._open: _BlockType | None = None
        self._index = -1
        """Index of the last block that began."""
        self._blank: list[str] = []
        """White space that begins no text block unless more text follows."""
        self.has_calls = False

    def add(self, parts: Sequence[ParsedText]) -> bytes:
        """Return the events for the next parsed parts of the answer."""
        events = []
        for parsed in parts:
            if parsed.reasoning and self._shows_thinking:
                events.append(self._piece("thinking", parsed.reasoning))
            if parsed.content:
                events.append(self.text(parsed.content))
            events += [self._call(call) for call in parsed.calls]
        return b"".join(events)

    def close(self) -> bytes:
        """Return the event that ends the open block, if there is one."""
        if self._open is None:
            return b""
        signed = self._signed(self._seal) if self._open == "thinking" and self._seal is not None else b""
        self._open = None
        return signed + event({"type": "content_block_stop", "index": self._index})

    def _signed(self, seal: SealTerms) -> bytes:
        """Return the event with the signature of the open block of thinking."""
        delta = {"type": "signature_delta", "signature": signature("reasoning", self._thought.digest(), **seal)}
        self._thought = hashlib.sha256()
        return event({"type": "content_block_delta", "index": self._index, "delta": delta})

    def text(self, text: str) -> bytes:
        """Return the events for the next text of the answer, which may be empty."""
        if self._open == "text" and text:
            return self._piece("text", text)
        self._blank.append(text)
        if not text or text.isspace():
            return b""
        whole = "".join(self._blank)
        self._blank.clear()
        return self._piece("text", whole)

    def _piece(self, kind: _BlockType, text: str) -> bytes:
        begun = b"" if self._open == kind else self.close() + self._start(_STARTS[kind])
        self._open = kind
        if kind == "thinking" and self._seal is not None:
            self._thought.update(text.encode(errors="replace"))
        return begun + _DELTAS[kind] % (self._index, to_json(text, ensure_ascii=True))

    def _call(self, call: Call) -> bytes:
        """Return the events of a call, or of a part of it. A call is a block of its own."""
        events = b""
        if call.name:
            self.has_calls = True
            self._blank.clear()
            events += self.close() + self._start({**tool_use_block(self._job_id, call), "input": {}})
            self._open = "tool_use"
        if call.arguments:
            events += _DELTAS["tool_use"] % (self._index, to_json(call.arguments, ensure_ascii=True))
        if call.end is not None:
            self._open = None
            events += event({"type": "content_block_stop", "index": self._index, **warning_member(call)})
        return events

    def _start(self, block: Mapping[str, Any]) -> bytes:
        self._index += 1
        return event({"type": "content_block_start", "index": self._index, "content_block": block})


# Encoding of Anthropic's answers: token chunks as typed events, and whole answers as JSON in parts.


class MessageStreamEncoder(ChunkEncoder):
    """Encodes the chunks of one answer as events. `message_start` goes out with the first chunk."""

    def __init__(self, head: AnswerHead) -> None:
        super().__init__(head.cut_at)
        self._head = head
        self._reader = AnswerReader(head.format)
        self._is_plain = head.format == PLAIN
        shows, seal = bool(head.options.get(SHOWS_THINKING)), head.options.get(SEAL)
        self._blocks = BlockEvents(head.job_ids[0], shows_thinking=shows, seal=seal)
        self._has_begun = False
        self._finish_reason: FinishReason | None = None
        self._stop: str | None = None

    def end(self, usages: Sequence[Usage]) -> bytes:
        """Return the events with the stop reason and the usage."""
        usage = whole_usage_of(self._head.params, self._head.max_total_tokens, usages)
        fills = "max_tokens" in usage
        delta = stop_of(self._finish_reason, self._stop, calls=self._blocks.has_calls, fills_context=fills)
        last = event({"type": "message_delta", "delta": delta, "usage": usage})
        return last + event({"type": "message_stop"})

    def _event_of(self, chunk: Chunk) -> bytes:
        if chunk.outcome is not None and not chunk.text and chunk.finish_reason is None:
            return b""  # The last entry of a log. If the job failed, it may also be the first one.
        begun = b"" if self._has_begun else self._start(chunk.num_prompt_tokens or 0)
        if chunk.finish_reason is None:
            return begun + (self._blocks_of(chunk.text) if chunk.text else b"")
        self._finish_reason = chunk.finish_reason
        text, self._stop = without_stop(chunk.text, chunk.finish_reason, self._head.params.stop)
        blocks = self._blocks_of(text)
        end = self._reader.end_in_order(is_cut=is_cut(chunk.finish_reason))
        return begun + blocks + self._blocks.add(end) + self._blocks.close()

    def _blocks_of(self, text: str) -> bytes:
        # Without a parser the reader would only copy the text, at twice the cost of the event.
        return self._blocks.text(text) if self._is_plain else self._blocks.add(self._reader.push_in_order(text))

    def _start(self, num_prompt_tokens: int) -> bytes:
        self._has_begun = True
        message = {
            **message_of(self._head.job_ids[0], self._head.model),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }
        return event({"type": "message_start", "message": {**message, "usage": usage_of(num_prompt_tokens, 0, 0)}})


class MessageWholeEncoder(WholeEncoder):
    """Encodes a whole answer."""

    def __init__(self, head: AnswerHead) -> None:
        self._message = WholeMessage(
            head.job_ids[0],
            head.model,
            head.params,
            head.format,
            shows_thinking=bool(head.options.get(SHOWS_THINKING)),
            seal=head.options.get(SEAL),
            max_total_tokens=head.max_total_tokens,
        )

    def head(self) -> bytes:
        """Return the members before the content."""
        return self._message.head()

    def parts_of(self, index: int, result: PackedResult) -> Iterator[bytes]:
        """Yield the content and the stop reason. Empty parts come while the text is parsed."""
        return self._message.parts_of(result)

    def tail(self, usages: Sequence[Usage | None]) -> bytes:
        """Return the usage."""
        return self._message.tail(usages)


# Anthropic's messages as a dialect of the gateway.


class MessagesDialect(Dialect):
    """Answers of `/v1/messages`."""

    async def completed(self, client: AsyncClient, generation: GenerationRequest) -> GenerationRequest:
        """Return the request without reasoning that this service did not sign, and with what signs the new one."""
        options = generation.body.options
        if not (options.get(SHOWS_THINKING) or options.get(THOUGHTS)) or not await may_reason(client, generation):
            return generation
        terms = await seal_terms_of(client, generation)
        generation = without_foreign_reasoning(generation, terms, "messages.thinking")
        return replace(generation, body=replace(generation.body, options={**options, SEAL: terms}))

    keep_alive = PING

    def stream(self, head: AnswerHead) -> StreamEncoder:
        """Return the encoder of a streamed answer. Raises RequestError if the caller wants to resume a stream."""
        if head.cut_at is not None:
            message = "after: a stream of this API has no event ids; repeat the request with its Idempotency-Key"
            raise RequestError(message, param="after")
        return MessageStreamEncoder(head)

    def whole(self, head: AnswerHead) -> WholeEncoder:
        """Return the encoder of a whole answer."""
        return MessageWholeEncoder(head)

    def error_event(self, error: PenstockError) -> bytes:
        """Return the error as the last event of a stream."""
        return error_event(error, AnthropicErrors())
