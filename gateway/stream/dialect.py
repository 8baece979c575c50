"""The interface between `answer.py` and the APIs' folders: what an API must provide for its answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.contract.errors import PenstockError
from penstock.contract.job import SamplingParams
from penstock.contract.output import Chunk, Usage
from penstock.contract.waiting import WaitUpdate, members_of
from penstock.gateway.stream.generation_request import StreamPosition
from penstock.gateway.stream.sse import event
from penstock.producer.client.request import Prompt
from penstock.producer.openai.parsed_text import AnswerFormat
from penstock.queue.packed_result import PackedResult


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """The facts about an answer that are known before its first token."""

    job_ids: Sequence[str]
    """One job for each prompt of the request."""
    model: str
    created_s: int
    params: SamplingParams
    form: AnswerFormat
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

    @property
    def indices(self) -> dict[str, int]:
        """Map each job id to the index of its prompt."""
        return {job_id: index for index, job_id in enumerate(self.job_ids)}


class StreamEncoder(ABC):
    """Encodes one answer as server-sent events."""

    @abstractmethod
    def parts_of(self, batch: Sequence[Chunk]) -> Iterator[bytes]:
        """Yield the events of one job's next chunks, in parts that bound the time and memory for one of them.

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

    def needs_whole_log(self, options: Mapping[str, Any]) -> bool:
        """Return whether the rest of a resumed stream depends on its first chunks because of these options."""
        return False

    @abstractmethod
    def stream(self, head: AnswerHead) -> StreamEncoder:
        """Return the encoder of a streamed answer."""

    @abstractmethod
    def whole(self, head: AnswerHead) -> WholeEncoder:
        """Return the encoder of a whole answer."""

    @abstractmethod
    def error_event(self, error: PenstockError) -> bytes:
        """Return the last event of a stream that fails after it has begun."""
