"""What a dialect of HTTP provides for its answers, and the base of all encoders of events."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from penstock.contract.errors import InvariantError, PenstockError, StreamDivergedError
from penstock.contract.job import SamplingParams
from penstock.contract.output import Chunk, Usage, WaitUpdate, members_of
from penstock.gateway.errors import error_body
from penstock.gateway.request.generation import FIRST_OF_TWO, GenerationRequest, StreamPosition
from penstock.gateway.stream.writer import PIECE_BYTES, event
from penstock.producer.client import AsyncClient
from penstock.producer.client.request import Prompt
from penstock.producer.parsing.parsed_text import PLAIN, AnswerFormat
from penstock.queue.results import PackedResult

# What an API must provide for its answers.


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """The facts about an answer that are known before its first token."""

    job_ids: Sequence[str]
    """One job for each prompt of the request."""
    model: str
    created_s: int
    params: SamplingParams
    format: AnswerFormat
    """How to parse the text."""
    echoes: bool = False
    """Whether the text begins with the prompt."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The options of `ParsedBody` that only this API has."""
    cut_at: StreamPosition | None = None
    """Resume a stream after this position."""
    replays: bool = False
    """Whether a resumed stream is read from its start."""
    event_ids: bool = False
    """Whether the events of a stream have ids."""
    prompts: Sequence[Prompt] = ()
    """The prompts of the request, if the dialect shows them. Not known of a resumed stream."""
    max_total_tokens: int | None = None
    """The most tokens of prompt and output together, to which `params.max_tokens` is lowered."""
    similarity: str = "cosine"
    """How the pool's embeddings are compared."""

    @property
    def indices(self) -> dict[str, int]:
        """Map each job id to the index of its prompt."""
        return {job_id: index for index, job_id in enumerate(self.job_ids)}


_FORM = TypeAdapter(AnswerFormat)


def packed_format(form: AnswerFormat) -> bytes:
    """Return the bytes of a format; none of the plain one, which most answers have."""
    return b"" if form == PLAIN else _FORM.dump_json(form)


def format_of_packed(packed: bytes) -> AnswerFormat:
    """Return the format that `packed_format` packed."""
    return _FORM.validate_json(packed) if packed else PLAIN


class StreamEncoder(ABC):
    """Encodes one answer as server-sent events."""

    __slots__ = ()

    @abstractmethod
    def parts_of(self, batch: Sequence[Chunk]) -> Iterable[bytes]:
        """Return the events of one job's next chunks, in parts that bound the time and memory for one of them.

        Raises StreamDivergedError if the log no longer contains the position `cut_at`.
        """

    def waiting(self, job_id: str, update: WaitUpdate) -> bytes:
        """Return the event with a waiting job's queue position or prompt progress. No stream resumes after it."""
        return event(members_of(update))

    @abstractmethod
    def end(self, usages: Sequence[Usage]) -> bytes:
        """Return the events after the last chunk. `usages` has one entry for each job."""


class WholeEncoder(ABC):
    """Encodes one answer as a JSON object, in parts: the head, the results in the order of the prompts, the tail."""

    @abstractmethod
    def head(self) -> bytes:
        """Return the part before the results."""

    @abstractmethod
    def parts_of(self, index: int, result: PackedResult) -> Iterator[bytes]:
        """Yield the parts of the result of prompt `index`."""

    @abstractmethod
    def tail(self, usages: Sequence[Usage | None]) -> bytes:
        """Return the part after the results. `usages` has one entry for each job."""


class Dialect(ABC):
    """One API's answers."""

    parses_text: bool = True
    """Whether tool calls and reasoning are parsed from the text."""
    shows_prompts: bool = False
    """Whether answers may contain parts of the prompts."""
    keep_alive: bytes | None = None
    """The bytes that a silent stream sends from time to time. None: a comment."""

    async def completed(self, client: AsyncClient, generation: GenerationRequest) -> GenerationRequest:
        """Return the request with what this API must read beside the body, before any job is submitted."""
        return generation

    def needs_whole_log(self, options: Mapping[str, Any]) -> bool:
        """Return whether the rest of a resumed stream depends on its first chunks because of these options."""
        return False

    @abstractmethod
    def stream(self, head: AnswerHead) -> StreamEncoder:
        """Return the encoder of a streamed answer."""

    @abstractmethod
    def whole(self, head: AnswerHead) -> WholeEncoder:
        """Return the encoder of a whole answer."""

    def error_event(self, error: PenstockError) -> bytes:
        """Return the last event of a stream that fails after it has begun. This one is OpenAI's."""
        return event(error_body(error))


# Encoding of a job's chunks as server-sent events: the base of all APIs' encoders.

MAX_EVENTS_OF_PART = 256


class StreamState:
    """The position of a stream. Event ids encode it: `<job>:<chunk>:<tokens of the stream up to the chunk's end>`.

    The first of two events of one chunk has FIRST_OF_TWO after that.

    A resumed stream skips the chunks that the caller already has. The token count reveals whether the job's log is
    still the same. If Redis lost its last writes, another node may have written the log again with other chunk borders.
    """

    __slots__ = ("_cut_at", "_half_sent", "_has_begun", "num_tokens")

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

    __slots__ = ("_progress",)

    def __init__(self, cut_at: StreamPosition | None) -> None:
        """`cut_at`: resume after this position."""
        self._progress = StreamState(cut_at)

    def parts_of(self, batch: Sequence[Chunk]) -> Iterable[bytes]:
        """Return the events of one job's next chunks, in parts."""
        if len(batch) == 1:
            events = self._event_of(batch[0])
            return (events,) if events else ()
        return joined(map(self._event_of, batch))

    @abstractmethod
    def _event_of(self, chunk: Chunk) -> bytes:
        """Return the event of the next chunk, or nothing if the caller needs none for it."""


def joined(events: Iterable[bytes]) -> Iterator[bytes]:
    """Join events to parts. A part ends at PIECE_BYTES or MAX_EVENTS_OF_PART."""
    part, size, num_events = list[bytes](), 0, 0
    for one in events:
        part.append(one)
        size += len(one)
        num_events += 1
        if size >= PIECE_BYTES or num_events >= MAX_EVENTS_OF_PART:
            yield b"".join(part)
            part, size, num_events = [], 0, 0
    if size:
        yield b"".join(part)


def event_id(chunk: Chunk, progress: StreamState, *, is_first_of_two: bool = False) -> str:
    """Return the id of the event of this chunk, or of the first of its two events."""
    return f"{chunk.job_id}:{chunk.index}:{progress.num_tokens}" + (FIRST_OF_TWO if is_first_of_two else "")


# Answers of jobs with a task: one JSON object, never a stream.


class TaskDialect(Dialect):
    """Answers with a task's output. Errors have OpenAI's shape."""

    parses_text = False

    def __init__(self, encoder: Callable[[AnswerHead], WholeEncoder], *, shows_prompts: bool = False) -> None:
        """`encoder` returns the encoder of one answer. `shows_prompts`: whether answers may contain the prompts."""
        self._encoder = encoder
        self.shows_prompts = shows_prompts

    def stream(self, head: AnswerHead) -> StreamEncoder:
        """Raise InvariantError, because no body of these routes asks for a stream."""
        raise InvariantError("a task has no stream")

    def whole(self, head: AnswerHead) -> WholeEncoder:
        """Return the encoder of the answer."""
        return self._encoder(head)
