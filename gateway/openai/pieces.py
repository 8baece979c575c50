"""The pieces of a stream as events. Those of one choice differ in number and text alone: the rest is rendered once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pydantic_core import to_json

from penstock.contract.job import Chunk
from penstock.gateway.stream.sse import event
from penstock.producer.openai.reading import AnswerReader, Said
from penstock.producer.openai.render import Renderer, finish_reason_of

_MARK_ID = "\ue000"
_MARK_TEXT = "\ue001"
"""Private characters, which stand for what changes while the rest is rendered."""


class _Frame(NamedTuple):
    """What stands around the chunk's index and its text."""

    head: bytes
    middle: bytes
    tail: bytes


class PieceWriter:
    """Events of one answer's chunks; `indices` says which of its jobs is which."""

    def __init__(self, renderer: Renderer, indices: Mapping[str, int]) -> None:
        self._renderer = renderer
        self._indices = indices
        self._frames: dict[tuple[str, int], _Frame | None] = {}

    def events_of(self, batch: Sequence[Chunk]) -> bytes:
        """One event for each chunk that says something."""
        return b"".join([self._event_of(chunk) for chunk in batch if chunk.text or chunk.finish_reason])

    def _event_of(self, chunk: Chunk) -> bytes:
        if chunk.text and chunk.finish_reason is None:
            frame = self._frames.get((chunk.job_id, chunk.choice))
            if frame is not None:
                text = to_json(chunk.text, ensure_ascii=True)
                return b"%b%d%b%b%b" % (frame.head, chunk.index, frame.middle, text, frame.tail)
        finish_reason = finish_reason_of(chunk.finish_reason)
        if not chunk.text and finish_reason is None:
            return b""
        rendered = event(self._piece(chunk, chunk.text, finish_reason), f"{chunk.job_id}:{chunk.index}")
        if (chunk.job_id, chunk.choice) not in self._frames:
            # Behind the first piece, which is of another form.
            self._frames[chunk.job_id, chunk.choice] = self._frame_of(chunk)
        return rendered

    def _piece(self, chunk: Chunk, text: str, finish_reason: str | None) -> Mapping[str, object]:
        return self._renderer.piece(self._indices[chunk.job_id], chunk.choice, Said(text), finish_reason)

    def _frame_of(self, chunk: Chunk) -> _Frame | None:
        """None where a mark occurs in what is rendered around it, such as the model's name."""
        rendered = event(self._piece(chunk, _MARK_TEXT, None), f"{chunk.job_id}:{_MARK_ID}")
        head, *rest = rendered.split(_MARK_ID.encode())
        parts = b"".join(rest).split(to_json(_MARK_TEXT, ensure_ascii=True))
        return _Frame(head, *parts) if len(rest) == 1 and len(parts) == 2 else None


class ReadPieceWriter:
    """The same where more is said than text: each chunk gives an event of what it made certain, or none.

    Chats may be read for calls and reasoning, and tokens may come with how likely they were.
    """

    def __init__(self, renderer: Renderer, indices: Mapping[str, int], *, after: int) -> None:
        """Events of chunks up to index `after` went out before; they are read again for what follows from them."""
        self._renderer = renderer
        self._indices = indices
        self._after = after
        self._readers: dict[tuple[str, int], AnswerReader] = {}
        self._have_called: set[tuple[str, int]] = set()

    def events_of(self, batch: Sequence[Chunk]) -> bytes:
        """The events of one job's next chunks."""
        return b"".join([self._event_of(chunk) for chunk in batch])

    def _event_of(self, chunk: Chunk) -> bytes:
        index = self._indices[chunk.job_id]
        piece = self._renderer.prompt_piece(index, chunk.prompt_logprobs) if chunk.prompt_logprobs else None
        if chunk.text or chunk.finish_reason or chunk.logprobs:
            piece = self._piece_of(chunk, index)
        return event(piece, f"{chunk.job_id}:{chunk.index}") if piece and chunk.index > self._after else b""

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
