"""The pieces of a stream as events. Those of one choice differ in numbers and text alone: the rest is rendered once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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
"""Private characters, which stand for what changes while the rest is rendered."""


class _Frame(NamedTuple):
    """What stands around the chunk's numbers and its text."""

    head: bytes
    middle: bytes
    tail: bytes


class StreamState:
    """How far a stream is, as its events' ids say it: `<job>:<chunk>:<tokens of the stream up to the chunk's end>`.

    One that goes on passes over the chunks that went out before. The tokens tell whether the log is still the one that
    was read then, or was lost with Redis's last writes and made anew, with other cuts.
    """

    def __init__(self, cut_at: StreamPosition | None) -> None:
        self._cut_at = cut_at
        self._has_begun = cut_at is None
        self.num_tokens = 0

    def is_new(self, chunk: Chunk) -> bool:
        """Counts the next chunk in; whether it did not go out before. Raises StreamDivergedError."""
        if not self._has_begun:
            self._has_begun, self.num_tokens = True, chunk.position
        self.num_tokens += len(chunk.token_ids)
        return self._cut_at is None or self._is_behind(self._cut_at, chunk)

    def _is_behind(self, cut_at: StreamPosition, chunk: Chunk) -> bool:
        if chunk.index < cut_at.index:
            return False
        if (chunk.index, self.num_tokens) != (cut_at.index, cut_at.num_tokens):
            raise StreamDivergedError(
                f"the stream of job {chunk.job_id} was cut at a chunk that is no longer in its log"
            )
        self._cut_at = None
        return False


class SseEncoder:
    """Events of one answer's chunks; `indices` says which of its jobs is which."""

    def __init__(self, renderer: Renderer, indices: Mapping[str, int], cut_at: StreamPosition | None) -> None:
        """Raises StreamDivergedError at the events of a stream that was `cut_at` a place that is no longer there."""
        self._renderer = renderer
        self._indices = indices
        self._progress = StreamState(cut_at)
        self._frames: dict[tuple[str, int], _Frame | None] = {}

    def parts_of(self, batch: Sequence[Chunk]) -> Iterator[bytes]:
        """One event for each chunk that says something, some of them at a time."""
        return _parts_of(batch, self._event_of)

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
            # Behind the first piece, which is of another form.
            self._frames[chunk.job_id, chunk.choice] = self._frame_of(chunk)
        return rendered

    def _piece(self, chunk: Chunk, text: str, finish_reason: str | None) -> Mapping[str, object]:
        return self._renderer.piece(self._indices[chunk.job_id], chunk.choice, ParsedText(text), finish_reason)

    def _frame_of(self, chunk: Chunk) -> _Frame | None:
        """None where a mark occurs in what is rendered around it, such as the model's name."""
        rendered = event(self._piece(chunk, _MARK_TEXT, None), f"{chunk.job_id}:{_MARK_ID}")
        head, *rest = rendered.split(_MARK_ID.encode())
        parts = b"".join(rest).split(to_json(_MARK_TEXT, ensure_ascii=True))
        return _Frame(head, *parts) if len(rest) == 1 and len(parts) == 2 else None


class ParsedSseEncoder:
    """The same where more is said than text: each chunk gives an event of what it made certain, or none.

    Chats may be read for calls and reasoning, and tokens may come with how likely they were.
    """

    def __init__(self, renderer: Renderer, indices: Mapping[str, int], cut_at: StreamPosition | None) -> None:
        """What went out before a stream was `cut_at` a place is read again for what follows from it; raises too."""
        self._renderer = renderer
        self._indices = indices
        self._progress = StreamState(cut_at)
        self._readers: dict[tuple[str, int], AnswerReader] = {}
        self._have_called: set[tuple[str, int]] = set()

    def parts_of(self, batch: Sequence[Chunk]) -> Iterator[bytes]:
        """The events of one job's next chunks, some of them at a time."""
        return _parts_of(batch, self._event_of)

    def _event_of(self, chunk: Chunk) -> bytes:
        index, is_new = self._indices[chunk.job_id], self._progress.is_new(chunk)
        piece = self._renderer.prompt_piece(index, chunk.prompt_logprobs) if chunk.prompt_logprobs else None
        if chunk.text or chunk.finish_reason or chunk.logprobs:
            piece = self._piece_of(chunk, index)
        return event(piece, _id_of(chunk, self._progress)) if piece and is_new else b""

    def _piece_of(self, chunk: Chunk, index: int) -> dict[str, Any] | None:
        key = chunk.job_id, chunk.choice
        reader = self._readers.setdefault(key, AnswerReader(self._renderer.form))
        said = reader.push(chunk.text)
        if chunk.finish_reason is not None:
            said += reader.end()
        if said.calls and not self._renderer.form.is_named:
            self._have_called.add(key)
        finish_reason = finish_reason_of(chunk.finish_reason, calls=key in self._have_called)
        if not said and finish_reason is None and not chunk.logprobs:
            return None
        return self._renderer.piece(index, chunk.choice, said, finish_reason, chunk.logprobs)


def _parts_of(batch: Sequence[Chunk], event_of: Callable[[Chunk], bytes]) -> Iterator[bytes]:
    """The events of chunks in parts that take a bounded time and memory; one that is large is a part of its own."""
    part, size, cost = list[bytes](), 0, 0
    for chunk in batch:
        of_chunk = event_of(chunk)
        part.append(of_chunk)
        size += len(of_chunk)
        cost += 1
        if size >= PIECE_BYTES or cost >= MAX_EVENTS_OF_PART:
            yield b"".join(part)
            part, size, cost = [], 0, 0
    if size:
        yield b"".join(part)


def _id_of(chunk: Chunk, progress: StreamState) -> str:
    return f"{chunk.job_id}:{chunk.index}:{progress.num_tokens}"
