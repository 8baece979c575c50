"""Encoding of a job's chunks as server-sent events: the base of all APIs' encoders."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence

from penstock.contract.errors import StreamDivergedError
from penstock.contract.output import Chunk
from penstock.gateway.stream.body_writer import PIECE_BYTES
from penstock.gateway.stream.dialect import StreamEncoder
from penstock.gateway.stream.generation_request import FIRST_OF_TWO, StreamPosition

MAX_EVENTS_OF_PART = 256


class StreamState:
    """The position of a stream. Event ids encode it: `<job>:<chunk>:<tokens of the stream up to the chunk's end>`.

    The first of two events of one chunk has FIRST_OF_TWO after that.

    A resumed stream skips the chunks that the caller already has. The token count reveals whether the job's log is
    still the same. If Redis lost its last writes, another node may have written the log again with other chunk borders.
    """

    def __init__(self, cut_at: StreamPosition | None) -> None:
        self._cut_at = cut_at
        self._half_sent = cut_at.index if cut_at is not None and cut_at.lacks_end else None
        self._has_begun = cut_at is None
        self.num_tokens = 0

    def lacks_end_of(self, chunk: Chunk) -> bool:
        """Return whether the caller has only the first of this chunk's two events."""
        return chunk.index == self._half_sent

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


class ChunkEncoder(StreamEncoder):
    """Encodes the chunks of one answer as events. Subclasses say how one chunk is encoded."""

    def __init__(self, cut_at: StreamPosition | None) -> None:
        """`cut_at`: resume after this position."""
        self._progress = StreamState(cut_at)

    def parts_of(self, batch: Sequence[Chunk]) -> Iterator[bytes]:
        """Yield the events of one job's next chunks, in parts."""
        if len(batch) == 1:
            return filter(None, (self._event_of(batch[0]),))
        return joined(map(self._event_of, batch))

    @abstractmethod
    def _event_of(self, chunk: Chunk) -> bytes:
        """Return the event of the next chunk, or nothing if the caller needs none for it."""


def joined(events: Iterable[bytes]) -> Iterator[bytes]:
    """Join events to parts. A part ends at PIECE_BYTES or MAX_EVENTS_OF_PART."""
    part, size, num_events = list[bytes](), 0, 0
    for event in events:
        part.append(event)
        size += len(event)
        num_events += 1
        if size >= PIECE_BYTES or num_events >= MAX_EVENTS_OF_PART:
            yield b"".join(part)
            part, size, num_events = [], 0, 0
    if size:
        yield b"".join(part)


def event_id(chunk: Chunk, progress: StreamState, *, is_first_of_two: bool = False) -> str:
    """Return the id of the event of this chunk, or of the first of its two events."""
    return f"{chunk.job_id}:{chunk.index}:{progress.num_tokens}" + (FIRST_OF_TWO if is_first_of_two else "")
