"""Encoding of token chunks as server-sent events.

The events of one choice differ only in numbers and text, so the rest of the event is rendered once and reused.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic_core import to_json

from penstock.contract.errors import StreamDivergedError
from penstock.contract.job import Chunk
from penstock.gateway.stream.body_writer import PIECE_BYTES
from penstock.gateway.stream.generation_request import StreamPosition
from penstock.gateway.stream.sse import event
from penstock.producer.openai.parsed_text import AnswerReader, ParsedText
from penstock.producer.openai.render import Renderer, finish_reason_of

MAX_EVENTS_OF_PART = 256
_MARK_ID = "\ue000"
_MARK_TEXT = "\ue001"
"""Characters from Unicode's private-use area, used as placeholders for the id and text of an event."""


class _Frame(NamedTuple):
    """The bytes of an event before its numbers, between numbers and text, and after the text."""

    head: bytes
    middle: bytes
    tail: bytes


class StreamState:
    """The position of a stream. Event ids encode it: `<job>:<chunk>:<tokens of the stream up to the chunk's end>`.

    A resumed stream skips the chunks that the caller already has. The token count reveals whether the job's log is
    still the same. If Redis lost its last writes, another node may have written the log again with other chunk borders.
    """

    def __init__(self, cut_at: StreamPosition | None) -> None:
        self._cut_at = cut_at
        self._has_begun = cut_at is None
        self.num_tokens = 0

    def is_new(self, chunk: Chunk) -> bool:
        """Advance past the next chunk and return whether the caller still needs it.

        Raises StreamDivergedError if the log no longer contains the chunk at which the stream was cut.
        """
        if not self._has_begun:
            self._has_begun, self.num_tokens = True, chunk.position
        self.num_tokens += len(chunk.token_ids)
        if self._cut_at is None:
            return True
        self._skip(self._cut_at, chunk)
        return False

    def _skip(self, cut_at: StreamPosition, chunk: Chunk) -> None:
        if chunk.index < cut_at.index:
            return
        if (chunk.index, self.num_tokens) != (cut_at.index, cut_at.num_tokens):
            raise StreamDivergedError(
                f"the stream of job {chunk.job_id} was cut at a chunk that is no longer in its log"
            )
        self._cut_at = None


class _Encoder(ABC):
    """Encodes the chunks of one answer as events. Subclasses say how one chunk is encoded."""

    def __init__(self, renderer: Renderer, indices: Mapping[str, int], cut_at: StreamPosition | None) -> None:
        """`indices` maps a job id to the index of its prompt. `cut_at`: resume after this position."""
        self._renderer = renderer
        self._indices = indices
        self._progress = StreamState(cut_at)

    def parts_of(self, batch: Sequence[Chunk]) -> Iterator[bytes]:
        """Yield the events of one job's next chunks, joined into parts.

        A part ends at PIECE_BYTES or MAX_EVENTS_OF_PART, which bounds the time and memory for one part.
        """
        part, size, cost = list[bytes](), 0, 0
        for chunk in batch:
            encoded = self._event_of(chunk)
            part.append(encoded)
            size += len(encoded)
            cost += 1
            if size >= PIECE_BYTES or cost >= MAX_EVENTS_OF_PART:
                yield b"".join(part)
                part, size, cost = [], 0, 0
        if size:
            yield b"".join(part)

    @abstractmethod
    def _event_of(self, chunk: Chunk) -> bytes:
        """Return the event of the next chunk, or nothing if the caller needs none for it."""


class SseEncoder(_Encoder):
    """Encodes the chunks of one answer as events, for answers that need only the text.

    A chunk without text or finish reason gives no event.
    Encoding raises StreamDivergedError if the log no longer contains the position `cut_at`.
    """

    def __init__(self, renderer: Renderer, indices: Mapping[str, int], cut_at: StreamPosition | None) -> None:
        super().__init__(renderer, indices, cut_at)
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
        rendered = event(self._piece(chunk, chunk.text, finish_reason), _id_of(chunk, self._progress))
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


class ParsedSseEncoder(_Encoder):
    """Encodes the chunks of one answer whose text is parsed, or which has log-probabilities.

    The parser looks for tool calls and reasoning in a chat. A chunk gives an event only for content that the parser
    has recognized by then.
    """

    def __init__(self, renderer: Renderer, indices: Mapping[str, int], cut_at: StreamPosition | None) -> None:
        """As for SseEncoder. A resumed stream is parsed again from its start to restore the parser's state."""
        super().__init__(renderer, indices, cut_at)
        self._readers: dict[tuple[str, int], AnswerReader] = {}
        self._have_called: set[tuple[str, int]] = set()

    def _event_of(self, chunk: Chunk) -> bytes:
        index, is_new = self._indices[chunk.job_id], self._progress.is_new(chunk)
        piece = self._renderer.prompt_piece(index, chunk.prompt_logprobs) if chunk.prompt_logprobs else None
        if chunk.text or chunk.finish_reason or chunk.logprobs:
            piece = self._piece_of(chunk, index)
        return event(piece, _id_of(chunk, self._progress)) if piece and is_new else b""

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


def _id_of(chunk: Chunk, progress: StreamState) -> str:
    return f"{chunk.job_id}:{chunk.index}:{progress.num_tokens}"
