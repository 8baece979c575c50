"""Encoding of a job's chunks as server-sent events, and of its result as a JSON object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.contract.errors import RequestError, StreamDivergedError
from penstock.contract.output import Chunk, Usage
from penstock.gateway.stream.encoder import ChunkEncoder
from penstock.gateway.stream.sse import event
from penstock.producer.client.job_objects import outcome_object, usage_object
from penstock.producer.openai.json_parts import Items, Rows, Text
from penstock.producer.openai.logprobs import chat_logprobs, prompt_logprobs, whole_chat_logprobs
from penstock.queue.packed_result import PackedChoice, PackedResult

_MAX_DIGITS = 9


@dataclass(frozen=True, slots=True)
class StreamStart:
    """Where a job's stream begins: after the chunk `index`, or with `index` -1 at the beginning."""

    index: int = -1
    end: int | None = None
    """Number of tokens of that chunk's choice up to its end, if known. It reveals whether the log is still the same."""

    @property
    def read_after(self) -> int:
        """The index of the chunk after which to read. The chunk `index` is read again to compare its end."""
        return self.index if self.end is None else self.index - 1


def stream_start_of(text: str | None) -> StreamStart:
    """Parse `<chunk>` or an event id, `<chunk>:<tokens>`. Raises RequestError."""
    if not text:
        return StreamStart()
    index, colon, end = text.partition(":")
    numbers = (index, end) if colon else (index,)
    if not all(number.isdecimal() and len(number) <= _MAX_DIGITS for number in numbers):
        raise RequestError("after: must be the index of a chunk, or an event id <chunk>:<tokens>", param="after")
    return StreamStart(int(index), int(end) if colon else None)


class JobEncoder(ChunkEncoder):
    """Encodes each chunk as one event with the id `<chunk>:<tokens of its choice up to the chunk's end>`."""

    def __init__(self, start: StreamStart) -> None:
        super().__init__(None)
        self._unchecked = None if start.end is None else (start.index, start.end)

    def end(self, usages: Sequence[Usage]) -> bytes:
        """Return nothing, because the last chunk has the job's outcome."""
        return b""

    def _event_of(self, chunk: Chunk) -> bytes:
        position = (chunk.index, chunk.position + len(chunk.token_ids))
        if self._unchecked is not None:
            if position != self._unchecked:
                message = f"chunk {self._unchecked[0]} of job {chunk.job_id} is no longer the one that was delivered"
                raise StreamDivergedError(message)
            self._unchecked = None
            return b""
        return event(chunk_object(chunk), f"{position[0]}:{position[1]}")


def chunk_object(chunk: Chunk) -> dict[str, Any]:
    """Return one chunk as a JSON object. Members without a value are left out."""
    known = {
        "num_prompt_tokens": chunk.num_prompt_tokens,
        "finish_reason": chunk.finish_reason,
        "usage": None if chunk.usage is None else usage_object(chunk.usage),
        "outcome": None if chunk.outcome is None else outcome_object(chunk.outcome),
        "logprobs": chat_logprobs(chunk.logprobs),
        "prompt_logprobs": [*prompt_logprobs(chunk.prompt_logprobs)] or None,
    }
    if chunk.outcome is not None:
        tokens: dict[str, Any] = {}
    else:
        tokens = {"choice": chunk.choice, "position": chunk.position, "token_ids": chunk.token_ids, "text": chunk.text}
    return {"index": chunk.index, **tokens, **{name: value for name, value in known.items() if value is not None}}


def result_object(result: PackedResult) -> dict[str, Any]:
    """Return a job's result. Its long values are created when they are written."""
    answer: dict[str, Any] = {
        "choices": Items(lambda: map(_choice_object, result.choices)),
        "usage": None if result.usage is None else usage_object(result.usage),
    }
    if result.prompt_logprobs:
        answer["prompt_logprobs"] = Rows(lambda: prompt_logprobs(result.prompt_logprobs))
    return answer


def _choice_object(choice: PackedChoice) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "index": choice.index,
        "text": Text(lambda: [choice.text]),
        "token_ids": Rows(lambda: iter(choice.token_ids)),
        "finish_reason": choice.finish_reason,
    }
    return answer | ({"logprobs": whole_chat_logprobs(choice.logprobs)} if choice.logprobs else {})
