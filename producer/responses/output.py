"""The output of a response: a job's text, chunk by chunk, as items of reasoning, text and calls.

The items are a function of the job's chunks and of how the text is parsed. So every reading gives the same items.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal, NamedTuple

from penstock.contract.calls.reading import Call
from penstock.contract.output import Chunk, FinishReason, TokenLogprobs
from penstock.producer.openai.render import call_id_of, is_cut
from penstock.producer.openai.seals import sealed
from penstock.producer.parsing.parsed_text import PLAIN, AnswerFormat, AnswerReader, ParsedText
from penstock.producer.responses.tools import CalledTool, CallKind, TextInputReader, arguments_of, offered_name
from penstock.queue.results import PackedResult

ITEM_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "custom_tool_call": "ctc",
    "tool_search_call": "tsc",
    "compaction": "cmp",
}
Kind = Literal["reasoning", "message", "compaction"] | CallKind
ItemStatus = Literal["in_progress", "completed", "incomplete"]
NO_NAMES: Mapping[str, CalledTool] = {}
MAX_REPEATED_LOGPROBS = 8192
"""Log-probabilities of a stream that its last events repeat. A stream with more has them only in its deltas, because
they would take too much memory; the stored response has all of them."""


@dataclass(slots=True)
class OutputItem:
    """One item of a response's output."""

    job_id: str
    index: int
    kind: Kind
    status: ItemStatus = "in_progress"
    texts: list[str] = field(default_factory=list)
    """The parts of the text, of the reasoning, of the call's arguments, or of a custom tool's input."""
    name: str = ""
    namespace: str = ""
    call_id: str = ""
    sealed: str = ""
    """The whole reasoning with its seal, if it has one; of a compaction, the summary with its seal."""

    @property
    def id(self) -> str:
        """The item's id. It contains that of the job, so any gateway can resolve it."""
        return f"{ITEM_PREFIXES[self.kind]}_{self.index}_{self.job_id}"

    @property
    def has_text(self) -> bool:
        """Whether it is a text of the model or its reasoning."""
        return self.kind in ("message", "reasoning")

    @property
    def is_shown(self) -> bool:
        """Whether it makes a message in a later conversation by itself."""
        return self.kind not in ("reasoning", "compaction")

    @property
    def is_call(self) -> bool:
        """Whether it is the call of a tool."""
        return bool(self.call_id)


class Opened(NamedTuple):
    """An item begins."""

    item: OutputItem


class Grown(NamedTuple):
    """An item has more text."""

    item: OutputItem
    text: str


class Closed(NamedTuple):
    """An item ends."""

    item: OutputItem


OutputStep = Opened | Grown | Closed


class OutputReader:
    """Reads the chunks of a response's job, in order."""

    def __init__(
        self,
        job_id: str,
        answer_format: AnswerFormat,
        called: Mapping[str, CalledTool] = NO_NAMES,
        seal: Mapping[str, Any] | None = None,
        compaction: str = "",
    ) -> None:
        """`called` and `compaction` are those of the response's record. `seal`: how reasoning is sealed, if it is."""
        self.items: list[OutputItem] = []
        self.finish_reason: FinishReason | None = None
        self._job_id = job_id
        self._reader = None if answer_format == PLAIN else AnswerReader(answer_format)
        self._called = called
        self._seal = seal
        self._compaction = compaction
        self._open: OutputItem | None = None
        self._input: TextInputReader | None = None
        """Reads the input of the open call, if it is that of a custom tool."""

    def push(self, text: str, finish_reason: FinishReason | None) -> Iterator[OutputStep]:
        """Parse the next chunk, and yield the changes that it makes to the output."""
        yield from self._begin_output()
        yield from self._steps([ParsedText(text)] if self._reader is None else self._reader.push_in_order(text))
        if finish_reason is not None:
            self.finish_reason = finish_reason
            yield from self._finish("incomplete" if finish_reason == "length" else "completed")
            if not any(item.is_shown or item.has_text for item in self.items) and finish_reason == "stop":
                yield from self._begin("message")
                yield from self._close("completed")

    def join_texts(self) -> None:
        """Join the parts of each item's text. Many short parts take ten times the memory of their text."""
        for item in self.items:
            if len(item.texts) > 1:
                item.texts = ["".join(item.texts)]

    def end(self) -> Iterator[OutputStep]:
        """Handle the end of the job, and yield the changes: if the job was cut short, its last item is still open."""
        yield from self._begin_output()
        if self.finish_reason is None:
            yield from self._finish("incomplete")

    def _begin_output(self) -> Iterator[OutputStep]:
        """Yield the item before all others, if there is one."""
        content, self._compaction = self._compaction, ""
        if content:
            item = OutputItem(self._job_id, len(self.items), "compaction", "completed", sealed=content)
            self.items.append(item)
            yield Opened(item)
            yield Closed(item)

    def _finish(self, status: ItemStatus) -> Iterator[OutputStep]:
        if self._reader is not None:
            yield from self._steps(self._reader.end_in_order(is_cut=is_cut(self.finish_reason)))
        yield from self._close(status)

    def _steps(self, parts: Sequence[ParsedText]) -> Iterator[OutputStep]:
        for parsed in parts:
            if parsed.reasoning:
                yield from self._grow("reasoning", parsed.reasoning)
            if parsed.content:
                yield from self._grow("message", parsed.content)
            for call in parsed.calls:
                yield from self._call_steps(call)

    def _call_steps(self, call: Call) -> Iterator[OutputStep]:
        if call.name:
            called = self._called.get(call.name) or CalledTool("function_call", call.name)
            yield from self._begin(called.kind, called, call_id_of(self._job_id, 0, call.index))
            self._input = TextInputReader() if called.kind == "custom_tool_call" else None
        text = call.arguments if self._input is None else self._input.push(call.arguments)
        if call.end is not None and self._input is not None:
            text += self._input.end()
        if self._open is not None and text:
            yield from self._grow(self._open.kind, text)
        if call.end is not None:
            self._input = None
            yield from self._close("completed" if call.end == "whole" else "incomplete")

    def _grow(self, kind: Kind, text: str) -> Iterator[OutputStep]:
        if self._open is None or self._open.kind != kind:
            yield from self._begin(kind)
        item = self._open
        if item is not None:
            item.texts.append(text)
            yield Grown(item, text)

    def _begin(self, kind: Kind, called: CalledTool | None = None, call_id: str = "") -> Iterator[OutputStep]:
        yield from self._close("completed")
        item = self._open = OutputItem(self._job_id, len(self.items), kind, call_id=call_id)
        if called is not None:
            item.name, item.namespace = called.name, called.namespace
        self.items.append(item)
        yield Opened(item)

    def _close(self, status: ItemStatus) -> Iterator[OutputStep]:
        item, self._open = self._open, None
        if item is not None:
            item.status = status
            if item.kind == "reasoning" and self._seal is not None:
                item.sealed = sealed("reasoning", "".join(item.texts), **self._seal)
            yield Closed(item)


CHUNKS_PER_ROUND = 256
"""Chunks that are read between two rounds of the event loop."""


def reading_of(result: PackedResult, reader: OutputReader) -> Iterator[None]:
    """Read the chunks of a result's first choice, in rounds of CHUNKS_PER_ROUND. It yields after each round."""
    if not result.choices:
        return
    choice = result.choices[0]
    text, at, cuts = choice.text, 0, result.cuts()
    cut = next(cuts, None)
    for number in count(1):
        if cut is None:
            return
        _, _, num_chars = cut
        cut = next(cuts, None)
        for _ in reader.push(text[at : at + num_chars], choice.finish_reason if cut is None else None):
            pass
        at += num_chars
        if number % CHUNKS_PER_ROUND == 0:
            reader.join_texts()
            yield


def read_chunk(chunk: Chunk, reader: OutputReader) -> None:
    """Read a chunk and ignore the changes that it makes."""
    for _ in reader.push(chunk.text, chunk.finish_reason):
        pass


def message_of(items: Sequence[OutputItem]) -> dict[str, Any]:
    """Return the message of a chat that these items of a response's output stand for."""
    text = "".join(part for item in items if item.kind == "message" for part in item.texts)
    thoughts = ["".join(item.texts) for item in items if item.kind == "reasoning"]
    calls = [
        {"id": item.call_id, "name": offered_name(item.namespace, item.name), "arguments": _arguments_of(item)}
        for item in items
        # A request may contain whole calls only.
        if item.is_call and item.status == "completed"
    ]
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thoughts:
        message["reasoning"] = "\n".join(thoughts)
    return message | {"tool_calls": calls} if calls else message


def _arguments_of(item: OutputItem) -> str:
    text = "".join(item.texts)
    return arguments_of(text) if item.kind == "custom_tool_call" else text


class HeldLogprobs:
    """The log-probabilities of a stream that wait for their text, and those that the last events repeat."""

    def __init__(self) -> None:
        self.repeated: list[TokenLogprobs] = []
        self._waiting: list[TokenLogprobs] = []
        self._num_values = 0

    def add(self, entries: Sequence[TokenLogprobs]) -> None:
        """Add the log-probabilities of a chunk."""
        self._waiting += entries
        self._num_values += sum(len(entry.values) for entry in entries)
        if self._num_values <= MAX_REPEATED_LOGPROBS:
            self.repeated += entries
        else:
            self.repeated = []

    def take(self) -> list[TokenLogprobs]:
        """Return those that no delta has had yet."""
        waiting, self._waiting = self._waiting, []
        return waiting
