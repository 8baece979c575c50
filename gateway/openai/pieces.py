"""The pieces of a stream as events. Those of one choice differ in number and text alone: the rest is rendered once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

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
    """The same for chats whose text is read: each chunk gives an event of what it made certain, or none."""

    def __init__(self, renderer: Renderer, *, after: int) -> None:
        """Events of chunks up to index `after` went out before; they are read again for what follows from them."""
        self._renderer = renderer
        self._after = after
        self._readers: dict[int, AnswerReader] = {}
        self._have_called: set[int] = set()

    def events_of(self, batch: Sequence[Chunk]) -> bytes:
        """The events of one job's next chunks."""
        return b"".join([self._event_of(chunk) for chunk in batch if chunk.text or chunk.finish_reason])

    def _event_of(self, chunk: Chunk) -> bytes:
        reader = self._readers.setdefault(chunk.choice, AnswerReader(self._renderer.form))
        said = reader.push(chunk.text)
        if chunk.finish_reason is not None:
            said += reader.end()
        if said.calls:
            self._have_called.add(chunk.choice)
        finish_reason = finish_reason_of(chunk.finish_reason, has_calls=chunk.choice in self._have_called)
        if not said and finish_reason is None:
            return b""
        piece = self._renderer.piece(0, chunk.choice, said, finish_reason)
        return event(piece, f"{chunk.job_id}:{chunk.index}") if chunk.index > self._after else b""
