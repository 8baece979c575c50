"""Encoding of Anthropic's answers: token chunks as typed events, and whole answers as JSON in parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pydantic_core import to_json

from penstock.contract.output import Chunk, FinishReason, Usage
from penstock.gateway.anthropic.events import BlockEvents, event
from penstock.gateway.anthropic.render import (
    blocks_of,
    input_of,
    message_of,
    stop_of,
    tool_use_block,
    usage_of,
    warning_member,
    whole_usage_of,
    without_stop,
)
from penstock.gateway.anthropic.schemas import SHOWS_THINKING
from penstock.gateway.stream.dialect import AnswerHead, WholeEncoder
from penstock.gateway.stream.encoder import ChunkEncoder
from penstock.producer.openai.json_parts import json_parts
from penstock.producer.openai.parsed_text import PLAIN, AnswerReader
from penstock.producer.openai.render import is_cut
from penstock.queue.packed_result import PackedResult


class MessageStreamEncoder(ChunkEncoder):
    """Encodes the chunks of one answer as events. `message_start` goes out with the first chunk."""

    def __init__(self, head: AnswerHead) -> None:
        super().__init__(head.cut_at)
        self._head = head
        self._reader = AnswerReader(head.form)
        self._is_plain = head.form == PLAIN
        self._blocks = BlockEvents(head.job_ids[0], shows_thinking=bool(head.options.get(SHOWS_THINKING)))
        self._has_begun = False
        self._finish_reason: FinishReason | None = None
        self._stop: str | None = None

    def end(self, usages: Sequence[Usage]) -> bytes:
        """Return the events with the stop reason and the usage."""
        usage = whole_usage_of(self._head, usages)
        fills = "max_tokens" in usage
        delta = stop_of(self._finish_reason, self._stop, calls=self._blocks.has_calls, fills_context=fills)
        last = event({"type": "message_delta", "delta": delta, "usage": usage})
        return last + event({"type": "message_stop"})

    def _event_of(self, chunk: Chunk) -> bytes:
        if chunk.outcome is not None and not chunk.text and chunk.finish_reason is None:
            return b""  # The last entry of a log. If the job failed, it may also be the first one.
        begun = b"" if self._has_begun else self._start(chunk.num_prompt_tokens or 0)
        if chunk.finish_reason is None:
            return begun + (self._blocks_of(chunk.text) if chunk.text else b"")
        self._finish_reason = chunk.finish_reason
        text, self._stop = without_stop(chunk.text, chunk.finish_reason, self._head.params.stop)
        blocks = self._blocks_of(text)
        end = self._reader.end_in_order(is_cut=is_cut(chunk.finish_reason))
        return begun + blocks + self._blocks.add(end) + self._blocks.close()

    def _blocks_of(self, text: str) -> bytes:
        # Without a parser the reader would only copy the text, at twice the cost of the event.
        return self._blocks.text(text) if self._is_plain else self._blocks.add(self._reader.push_in_order(text))

    def _start(self, num_prompt_tokens: int) -> bytes:
        self._has_begun = True
        message = {**message_of(self._head), "content": [], "stop_reason": None, "stop_sequence": None}
        return event({"type": "message_start", "message": {**message, "usage": usage_of(num_prompt_tokens, 0, 0)}})


class MessageWholeEncoder(WholeEncoder):
    """Encodes a whole answer. Its blocks come in the order thinking, text, tool calls."""

    def __init__(self, head: AnswerHead) -> None:
        self._head = head

    def head(self) -> bytes:
        """Return the members before the content."""
        return to_json(message_of(self._head))[:-1] + b',"content":['

    def parts_of(self, index: int, result: PackedResult) -> Iterator[bytes]:
        """Yield the content and the stop reason."""
        choice, params = result.choices[0], self._head.params
        text, stop = without_stop(choice.text, choice.finish_reason, params.stop)
        parsed = self._head.form.read(text, is_cut=is_cut(choice.finish_reason))
        blocks = blocks_of(parsed, shows_thinking=bool(self._head.options.get(SHOWS_THINKING)))
        for number, block in enumerate(blocks):
            yield b"," if number else b""
            yield from json_parts(block)
        for number, call in enumerate(parsed.calls, start=len(blocks)):
            begun = to_json(tool_use_block(result.job_id, call) | warning_member(call))[:-1]
            yield (b"," if number else b"") + begun + b',"input":' + input_of(call) + b"}"
        fills = "max_tokens" in whole_usage_of(self._head, [result.usage])
        ending = stop_of(choice.finish_reason, stop, calls=bool(parsed.calls), fills_context=fills)
        yield b"]," + to_json(ending)[1:-1]

    def tail(self, usages: Sequence[Usage | None]) -> bytes:
        """Return the usage."""
        return b',"usage":' + to_json(whole_usage_of(self._head, usages)) + b"}"
