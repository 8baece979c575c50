"""The JSON of a response, in parts, so that memory never holds the text of a large one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from pydantic_core import to_json

from penstock.contract.job import lowered_max_tokens
from penstock.contract.output import Outcome, TokenLogprobs, Usage
from penstock.producer.openai.json_parts import Items, Rows, Text, chat_rows, json_parts
from penstock.producer.responses.output import OutputItem, OutputReader

RESPONSE_PREFIX = "resp_"
"""The start of a response's id. Behind it is the id of its job, so any gateway can resolve it."""

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
Logprobs = Iterable[TokenLogprobs]
SHOWN_SAMPLING = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
"""Sampling options that a response shows."""
_PIECE_BYTES = 64 << 10
_MAX_TOKENS_REACHED = {"reason": "max_output_tokens"}


class ShownRecord(Protocol):
    """What a response shows beside its output."""

    @property
    def created_s(self) -> int:
        """When the response was created, in Unix time."""

    @property
    def echo(self) -> bytes:
        """The members that repeat the request: a JSON object in ASCII."""

    @property
    def limits(self) -> tuple[int, int] | None:
        """The most tokens of the request, and those of prompt and output together to which they are lowered."""


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """The record of a response that is not stored."""

    created_s: int
    echo: bytes = field(repr=False)
    limits: tuple[int, int] | None


def response_id_of(job_id: str) -> str:
    """Return the id of a job's response."""
    return RESPONSE_PREFIX + job_id


def echo_of(repeated: bytes, learned: Mapping[str, Any]) -> bytes:
    """Return the members that repeat the request, with the model and the sampling that it got."""
    return repeated[:-1] + b"," + to_json(learned, ensure_ascii=True)[1:]


@dataclass(frozen=True, slots=True)
class ResponseEnd:
    """How a response ended."""

    status: Status
    finished_s: int
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None

    @property
    def members(self) -> dict[str, Any]:
        """The members of the response that depend on its end."""
        return {
            "status": self.status,
            "completed_at": self.finished_s if self.status == "completed" else None,
            "incomplete_details": _MAX_TOKENS_REACHED if self.status == "incomplete" else None,
            "error": self.error,
            "usage": self.usage,
        }


def end_of(
    record: ShownRecord, outcome: Outcome, finished_s: int, usage: Usage | None, reader: OutputReader
) -> ResponseEnd:
    """Return how a response ended, by its record, by the end of its job, and by what was read of it."""
    if outcome.state == "cancelled":
        return ResponseEnd("cancelled", finished_s)
    if outcome.state != "succeeded":
        message = outcome.message or f"the job {outcome.state}"
        return ResponseEnd("failed", finished_s, error={"code": outcome.code or "server_error", "message": message})
    status: Status = "incomplete" if reader.finish_reason == "length" else "completed"
    if usage is None:
        return ResponseEnd(status, finished_s)
    lowered = lowered_max_tokens(*record.limits, usage.prompt_tokens) if record.limits is not None else None
    limit = {} if lowered is None else {"max_output_tokens": lowered}
    return ResponseEnd(status, finished_s, usage_of(usage) | limit)


def usage_of(usage: Usage) -> dict[str, Any]:
    """Return the tokens that a response used."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def open_members(status: Status) -> dict[str, Any]:
    """Return the members, which depend on the end, of a response that has not ended."""
    return ResponseEnd(status, 0).members


def response_parts(
    job_id: str, record: ShownRecord, members: dict[str, Any], output: Iterable[bytes] = ()
) -> Iterator[bytes]:
    """Yield the JSON of a response, with the JSON of its output's items."""
    yield from response_head(job_id, record)
    yield from output
    yield response_tail(members)


def response_head(job_id: str, record: ShownRecord) -> Iterator[bytes]:
    """Yield the JSON of a response up to the items of its output."""
    head = {"id": response_id_of(job_id), "object": "response", "created_at": record.created_s}
    yield to_json(head, ensure_ascii=True)[:-1] + b","
    echo = memoryview(record.echo)[1:-1]
    for at in range(0, len(echo), _PIECE_BYTES):
        yield bytes(echo[at : at + _PIECE_BYTES])
    yield b',"output":['


def response_tail(members: dict[str, Any]) -> bytes:
    """Return the JSON of a response after the items of its output."""
    return b"]," + to_json(members, ensure_ascii=True)[1:]


def output_parts(items: Sequence[OutputItem], logprobs: Logprobs = ()) -> Iterator[bytes]:
    """Yield the JSON of the items of a response's output, without the brackets around them."""
    for number, item in enumerate(items):
        if number:
            yield b","
        yield from json_parts(item_of(item, logprobs), ensure_ascii=True)


def item_of(item: OutputItem, logprobs: Logprobs = (), *, is_new: bool = False) -> dict[str, Any]:
    """Return an item with lazy text (see `json_parts`). A new item has no content yet."""
    head: dict[str, Any] = {"id": item.id, "type": item.kind}
    if item.is_call:
        return head | {"status": item.status, "call_id": item.call_id} | _members_of_call(item, is_new=is_new)
    if item.kind == "compaction":
        return head | {"encrypted_content": item.sealed}
    content: Any = [] if is_new else Items(lambda: [part_of(item, logprobs)])
    if item.kind == "reasoning":
        encrypted = {"encrypted_content": item.sealed} if item.sealed else {}
        return head | {"status": item.status, "summary": [], "content": content} | encrypted
    return head | {"status": item.status, "role": "assistant", "content": content}


def _members_of_call(item: OutputItem, *, is_new: bool) -> dict[str, Any]:
    if item.kind == "tool_search_call":
        # The API has no deltas for it, and its arguments are an object, not the text of one.
        is_whole = item.status == "completed" and not is_new
        return {"execution": "client", "arguments": json.loads("".join(item.texts)) if is_whole else {}}
    text: Any = "" if is_new else Text(_texts_of(item))
    members = {"name": item.name, "input" if item.kind == "custom_tool_call" else "arguments": text}
    return members | {"namespace": item.namespace} if item.namespace else members


def part_of(item: OutputItem, logprobs: Logprobs = (), *, is_new: bool = False) -> dict[str, Any]:
    """Return the only content part of an item, with lazy text. A new part has no text yet."""
    text: Any = "" if is_new else Text(_texts_of(item))
    if item.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": [] if is_new else rows_of(logprobs)}


def rows_of(logprobs: Logprobs) -> Rows:
    """Return log-probabilities as a lazy list."""
    return Rows(lambda: chat_rows(logprobs))


def _texts_of(item: OutputItem) -> Callable[[], list[str]]:
    # One text instead of one part for each chunk, which would take longer to write.
    return lambda: ["".join(item.texts)]
