"""Encoding of a response's stream: typed events with sequence numbers, a function of the record and the job's log."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pydantic_core import to_json

from penstock.contract.errors import PenstockError
from penstock.contract.output import Chunk, Outcome, Usage, WaitUpdate, members_of
from penstock.gateway.apis.responses.record import StoredResponse
from penstock.gateway.errors import error_body
from penstock.gateway.request.earlier_reasoning import SealTerms
from penstock.gateway.stream.dialect import AnswerHead, Dialect, StreamEncoder, WholeEncoder, joined
from penstock.gateway.stream.writer import DONE, KEEP_ALIVE, event
from penstock.producer.openai.json_parts import Text, json_parts
from penstock.producer.responses.answer import (
    Status,
    end_of,
    item_of,
    open_members,
    output_parts,
    part_of,
    response_head,
    response_parts,
    response_tail,
    rows_of,
)
from penstock.producer.responses.output import (
    Closed,
    Grown,
    HeldLogprobs,
    Kind,
    Opened,
    OutputItem,
    OutputReader,
    OutputStep,
    reading_of,
)
from penstock.queue.results import PackedResult

Parts = Iterator[bytes]
_LAST_EVENTS: dict[Status, str] = {
    "completed": "response.completed",
    "incomplete": "response.incomplete",
    # OpenAI's API has no event of its own for a canceled response.
    "cancelled": "response.incomplete",
    "failed": "response.failed",
}
_DELTAS: dict[Kind, str] = {
    "message": "output_text",
    "reasoning": "reasoning_text",
    "function_call": "function_call_arguments",
    "custom_tool_call": "custom_tool_call_input",
}
"""Names of the events with new text. Other items come as a whole."""


class ResponseEncoder(StreamEncoder):
    """Encodes the chunks of one response's job as events. Events up to `starting_after` are counted but not sent."""

    def __init__(
        self, job_id: str, record: StoredResponse, starting_after: int = -1, seal: SealTerms | None = None
    ) -> None:
        """`seal`: how the reasoning is sealed; None: it is not."""
        self._job_id = job_id
        self._record = record
        self._starting_after = starting_after
        self._next = 0
        self._has_begun = self._is_running = False
        self._reader = OutputReader(job_id, record.format, record.called, seal, record.compaction)
        self._logprobs = HeldLogprobs()
        self._usage: Usage | None = None
        self._deltas: dict[int, tuple[bytes, bytes]] = {}

    def opening(self) -> Parts:
        """Yield the events before the job runs. A second call yields nothing."""
        if self._has_begun:
            return
        self._has_begun = True
        status: Status = "queued" if self._record.background else "in_progress"
        yield from self._state_event("response.created", status)
        if self._record.background:
            yield from self._state_event("response.queued", status)

    def parts_of(self, batch: Sequence[Chunk]) -> Parts:
        """Yield the events of the next chunks, in parts. The chunk with the outcome has its events in `closing`."""
        return joined(self._events_of(batch))

    def closing(self, outcome: Outcome, finished_s: int) -> Parts:
        """Yield the events after the job's end."""
        yield from self.opening()
        for step in self._reader.end():
            yield from self._step_events(step)
        end = end_of(self._record, outcome, finished_s, self._usage, self._reader)
        output = output_parts(self._reader.items, self._logprobs.repeated)
        response = response_parts(self._job_id, self._record, end.members, output)
        yield from self._numbered(_LAST_EVENTS[end.status], response)
        yield DONE

    def waiting(self, job_id: str, update: WaitUpdate) -> bytes:
        """Return the event with a waiting job's queue position or prompt progress. The stored stream does not have it.

        So it repeats the number of the event before it, and the numbers of stored events are the same at every read.
        https://www.openresponses.org/specification#extending-streaming-events
        """
        ((name, members),) = members_of(update).items()
        event = {"type": f"penstock:{name}", "sequence_number": self._next - 1, **members}
        return f"event: penstock:{name}\ndata: ".encode() + to_json(event, ensure_ascii=True) + b"\n\n"

    def end(self, usages: Sequence[Usage]) -> bytes:
        """Return the stream's last line."""
        return DONE

    def error(self, error: PenstockError) -> bytes:
        """Return the event of a stream that breaks off. The response itself may go on."""
        members = {"code": error.code, "message": error.message, "param": error.param}
        event = {"type": "error", "sequence_number": self._next, **members}
        return b"event: error\ndata: " + to_json(event, ensure_ascii=True) + b"\n\n"

    def _events_of(self, batch: Sequence[Chunk]) -> Parts:
        for chunk in batch:
            if chunk.outcome is not None:
                continue
            yield from self.opening()
            if not self._is_running:
                self._is_running = True
                yield from self._state_event("response.in_progress", "in_progress")
            if chunk.logprobs:
                self._logprobs.add(chunk.logprobs)
            self._usage = chunk.usage or self._usage
            for step in self._reader.push(chunk.text, chunk.finish_reason):
                yield from self._step_events(step)

    def _step_events(self, step: OutputStep) -> Parts:
        match step:
            case Opened(item):
                yield from self._opened(item)
            case Grown(item, text):
                yield from self._grown(item, text)
            case Closed(item):
                yield from self._closed(item)

    def _opened(self, item: OutputItem) -> Parts:
        added = {"output_index": item.index, "item": item_of(item, is_new=True)}
        yield from self._event("response.output_item.added", added)
        if item.has_text:
            added = self._place(item) | {"part": part_of(item, is_new=True)}
            yield from self._event("response.content_part.added", added)

    def _grown(self, item: OutputItem, text: str) -> Parts:
        if item.kind not in _DELTAS:
            return
        number, self._next = self._next, self._next + 1
        waiting = self._logprobs.take() if item.kind == "message" else []
        if number <= self._starting_after:
            return
        if waiting:
            self._next = number
            delta = self._place(item) | {"delta": Text(lambda: [text]), "logprobs": rows_of(waiting)}
            yield from self._event("response.output_text.delta", delta)
            return
        before, after = self._deltas.get(item.index) or self._frame_of(item)
        yield b"%b%d%b%b}\n\n" % (before, number, after, to_json(text, ensure_ascii=True))

    def _frame_of(self, item: OutputItem) -> tuple[bytes, bytes]:
        """Return the bytes of an item's deltas before and after the sequence number, up to the text."""
        name = _DELTAS[item.kind]
        place = self._place(item) | ({"logprobs": []} if item.kind == "message" else {})
        before = f'event: response.{name}.delta\ndata: {{"type":"response.{name}.delta","sequence_number":'
        frame = before.encode(), b"," + to_json(place, ensure_ascii=True)[1:-1] + b',"delta":'
        self._deltas[item.index] = frame
        return frame

    def _closed(self, item: OutputItem) -> Parts:
        logprobs = self._logprobs.repeated
        place, text = self._place(item), Text(lambda: ["".join(item.texts)])
        if item.kind == "function_call":
            done: dict[str, Any] = place | {"name": item.name, "arguments": text}
            yield from self._event("response.function_call_arguments.done", done)
        elif item.kind == "custom_tool_call":
            yield from self._event("response.custom_tool_call_input.done", place | {"input": text})
        elif item.has_text:
            is_text = item.kind == "message"
            name = "response.output_text.done" if is_text else "response.reasoning_text.done"
            yield from self._event(name, place | {"text": text} | ({"logprobs": rows_of(logprobs)} if is_text else {}))
            yield from self._event("response.content_part.done", place | {"part": part_of(item, logprobs)})
        done = {"output_index": item.index, "item": item_of(item, logprobs)}
        yield from self._event("response.output_item.done", done)

    def _place(self, item: OutputItem) -> dict[str, Any]:
        place: dict[str, Any] = {"item_id": item.id, "output_index": item.index}
        return place if item.is_call else place | {"content_index": 0}

    def _state_event(self, name: str, status: Status) -> Parts:
        yield from self._numbered(name, response_parts(self._job_id, self._record, open_members(status)))

    def _numbered(self, name: str, response: Parts) -> Parts:
        number, self._next = self._next, self._next + 1
        if number > self._starting_after:
            head = f'event: {name}\ndata: {{"type":"{name}","sequence_number":{number},"response":'
            yield head.encode()
            yield from response
            yield b"}\n\n"

    def _event(self, name: str, members: dict[str, Any]) -> Parts:
        number, self._next = self._next, self._next + 1
        if number > self._starting_after:
            yield f"event: {name}\ndata: ".encode()
            yield from json_parts({"type": name, "sequence_number": number, **members}, ensure_ascii=True)
            yield b"\n\n"


# The Responses API as a dialect of the gateway.


class ResponseDialect(Dialect):
    """Answers of `/v1/responses`. The options of an answer's head are `answer_options`."""

    keep_alive = KEEP_ALIVE
    """The events have sequence numbers in place of ids of server-sent events."""

    def stream(self, head: AnswerHead) -> ResponseEncoder:
        """Return the encoder of a streamed answer."""
        options = head.options
        return ResponseEncoder(head.job_ids[0], options["record"], options["starting_after"], options["seal"])

    def whole(self, head: AnswerHead) -> WholeEncoder:
        """Return the encoder of a whole answer."""
        options = head.options
        return ResponseWholeEncoder(head.job_ids[0], options["record"], options["finished_s"], options["seal"])

    def error_event(self, error: PenstockError) -> bytes:
        """Return the last event of a stream that fails before its first event."""
        return event({"type": "error", "sequence_number": 0, **error_body(error)["error"]})


def answer_options(
    record: StoredResponse, seal: SealTerms | None = None, *, starting_after: int = -1, finished_s: int = 0
) -> dict[str, Any]:
    """Return the options of an answer: its record, what seals its reasoning, and where it continues.

    `starting_after`: the last event that the caller has. `finished_s`: when the job ended.
    """
    return {"record": record, "seal": seal, "starting_after": starting_after, "finished_s": finished_s}


class ResponseWholeEncoder(WholeEncoder):
    """Encodes a response whose job is done."""

    def __init__(self, job_id: str, record: StoredResponse, finished_s: int, seal: SealTerms | None) -> None:
        self._seal = seal
        self._job_id = job_id
        self._record = record
        self._finished_s = finished_s
        # Of one request.
        self._members: dict[str, Any] = {}

    def head(self) -> bytes:
        """Return the part before the output."""
        return b"".join(response_head(self._job_id, self._record))

    def parts_of(self, index: int, result: PackedResult) -> Iterator[bytes]:
        """Yield the items of the output. Empty parts come while the text is parsed."""
        reader = OutputReader(
            self._job_id, self._record.format, self._record.called, self._seal, self._record.compaction
        )
        for _ in reading_of(result, reader):
            yield b""
        self._members = end_of(self._record, result.outcome, self._finished_s, result.usage, reader).members
        yield from output_parts(reader.items, result.choices[0].logprobs)

    def tail(self, usages: Sequence[Usage | None]) -> bytes:
        """Return the part after the output."""
        return response_tail(self._members)
