"""Encoding of OpenAI's answers: token chunks as server-sent events, and whole answers as JSON in parts.

The events of one choice differ only in numbers and text, so the rest of the event is rendered once and reused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic_core import to_json

from penstock.contract.job import Chunk, Usage
from penstock.gateway.stream.dialect import AnswerHead, WholeEncoder
from penstock.gateway.stream.encoder import ChunkEncoder, event_id
from penstock.gateway.stream.sse import DONE, event
from penstock.producer.openai.json_parts import json_parts
from penstock.producer.openai.parsed_text import AnswerReader, ParsedText
from penstock.producer.openai.render import Renderer, finish_reason_of, usage_of
from penstock.queue.packed_result import PackedResult

_MARK_ID = "\ue000"
_MARK_TEXT = "\ue001"
"""Characters from Unicode's private-use area, used as placeholders for the id and text of an event."""


class _Frame(NamedTuple):
    """The bytes of an event before its numbers, between numbers and text, and after the text."""

    head: bytes
    middle: bytes
    tail: bytes


class _OpenAIEncoder(ChunkEncoder):
    """The base of both encoders."""

    def __init__(self, renderer: Renderer, head: AnswerHead) -> None:
        super().__init__(head.cut_at)
        self._renderer = renderer
        self._indices = head.indices

    def end(self, usages: Sequence[Usage]) -> bytes:
        """Return the event with the usage, if the caller asked for it, and the stream's last line."""
        return (event(self._renderer.last_piece(usages)) if self._renderer.includes_usage else b"") + DONE


class SseEncoder(_OpenAIEncoder):
    """Encodes the chunks of one answer as events, for answers that need only the text.

    A chunk without text or finish reason gives no event.
    Encoding raises StreamDivergedError if the log no longer contains the position `cut_at`.
    """

    def __init__(self, renderer: Renderer, head: AnswerHead) -> None:
        super().__init__(renderer, head)
        self._frames: dict[tuple[str, int], _Frame | None] = {}

    def _event_of(self, chunk: Chunk) -> bytes:
        if not self._progress.is_new(chunk):
            return b""
        if chunk.text and chunk.finish_reason is None:
            frame = self._frames.get((chunk.job_id, chunk.choice))
            if frame is not None:
                text = to_json(chunk.text, ensure_ascii=True)
                num_tokens = self._progress.num_tokens
                return b"%b%d:%d%b%b%b" % (frame.head, chunk.index, num_tokens, frame.middle, text, frame.tail)
        finish_reason = finish_reason_of(chunk.finish_reason)
        if not chunk.text and finish_reason is None:
            return b""
        rendered = event(self._piece(chunk, chunk.text, finish_reason), event_id(chunk, self._progress))
        if (chunk.job_id, chunk.choice) not in self._frames:
            # The first event of a choice differs in shape, so the frame is built after it.
            self._frames[chunk.job_id, chunk.choice] = self._frame_of(chunk)
        return rendered

    def _piece(self, chunk: Chunk, text: str, finish_reason: str | None) -> Mapping[str, object]:
        return self._renderer.piece(self._indices[chunk.job_id], chunk.choice, ParsedText(text), finish_reason)

    def _frame_of(self, chunk: Chunk) -> _Frame | None:
        """Return the constant bytes of a choice's events, or None if they contain a placeholder character.

        The model's name, for example, may contain one.
        """
        rendered = event(self._piece(chunk, _MARK_TEXT, None), f"{chunk.job_id}:{_MARK_ID}")
        head, *rest = rendered.split(_MARK_ID.encode())
        parts = b"".join(rest).split(to_json(_MARK_TEXT, ensure_ascii=True))
        return _Frame(head, *parts) if len(rest) == 1 and len(parts) == 2 else None


class ParsedSseEncoder(_OpenAIEncoder):
    """Encodes the chunks of one answer whose text is parsed, or which has log-probabilities.

    The parser looks for tool calls and reasoning in a chat. A chunk gives an event only for content that the parser
    has recognized by then.
    """

    def __init__(self, renderer: Renderer, head: AnswerHead) -> None:
        """As for SseEncoder. A resumed stream is parsed again from its start to restore the parser's state."""
        super().__init__(renderer, head)
        self._readers: dict[tuple[str, int], AnswerReader] = {}
        self._have_called: set[tuple[str, int]] = set()

    def _event_of(self, chunk: Chunk) -> bytes:
        index, is_new = self._indices[chunk.job_id], self._progress.is_new(chunk)
        piece = self._renderer.prompt_piece(index, chunk.prompt_logprobs) if chunk.prompt_logprobs else None
        if chunk.text or chunk.finish_reason or chunk.logprobs:
            piece = self._piece_of(chunk, index)
        return event(piece, event_id(chunk, self._progress)) if piece and is_new else b""

    def _piece_of(self, chunk: Chunk, index: int) -> dict[str, Any] | None:
        key = chunk.job_id, chunk.choice
        reader = self._readers.setdefault(key, AnswerReader(self._renderer.form))
        parsed = reader.push(chunk.text)
        if chunk.finish_reason is not None:
            parsed += reader.end()
        if parsed.calls and not self._renderer.form.is_named:
            self._have_called.add(key)
        finish_reason = finish_reason_of(chunk.finish_reason, calls=key in self._have_called)
        if not parsed and finish_reason is None and not chunk.logprobs:
            return None
        return self._renderer.piece(index, chunk.choice, parsed, finish_reason, chunk.logprobs)


class OpenAIWholeEncoder(WholeEncoder):
    """Encodes a whole answer. The choices of all results form one list."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._num_choices = 0

    def head(self) -> bytes:
        """Return the members before the choices."""
        return to_json(self._renderer.whole_head())[:-1] + b',"choices":['

    def parts_of(self, index: int, result: PackedResult) -> Iterator[bytes]:
        """Yield the choices of one result."""
        for choice in self._renderer.whole_choices(index, result):
            if self._num_choices:
                yield b","
            yield from json_parts(choice)
            self._num_choices += 1

    def tail(self, usages: Sequence[Usage | None]) -> bytes:
        """Return the usage, which follows the choices."""
        return b'],"usage":' + to_json(usage_of(usages)) + b"}"
