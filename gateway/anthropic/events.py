"""The events of a streamed Anthropic message, and the state of its content blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic_core import to_json

from penstock.gateway.anthropic.render import tool_use_block, warning_member
from penstock.producer.openai.parsed_text import ParsedText
from penstock.producer.openai.tool_calls import Call

_BlockType = Literal["text", "thinking", "tool_use"]
_DELTA = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":'
_DELTAS = {
    "text": _DELTA + b'"text_delta","text":%b}}\n\n',
    "thinking": _DELTA + b'"thinking_delta","thinking":%b}}\n\n',
    "tool_use": _DELTA + b'"input_json_delta","partial_json":%b}}\n\n',
}
_STARTS: dict[_BlockType, dict[str, Any]] = {
    "text": {"type": "text", "text": ""},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}


def event(payload: Mapping[str, Any]) -> bytes:
    """Encode one event; its name is the payload's `type`. It is ASCII, because some readers split at U+2028."""
    return b"event: %b\ndata: %b\n\n" % (str(payload["type"]).encode(), to_json(payload, ensure_ascii=True))


PING = event({"type": "ping"})


class BlockEvents:
    """Writes the content blocks of one answer as events. At most one block is open."""

    def __init__(self, job_id: str, *, shows_thinking: bool) -> None:
        self._job_id = job_id
        self._shows_thinking = shows_thinking
        self._open: _BlockType | None = None
        self._index = -1
        """Index of the last block that began."""
        self._blank: list[str] = []
        """White space that begins no text block unless more text follows."""
        self.has_calls = False

    def add(self, parts: Sequence[ParsedText]) -> bytes:
        """Return the events for the next parsed parts of the answer."""
        events = []
        for parsed in parts:
            if parsed.reasoning and self._shows_thinking:
                events.append(self._piece("thinking", parsed.reasoning))
            if parsed.content:
                events.append(self.text(parsed.content))
            events += [self._call(call) for call in parsed.calls]
        return b"".join(events)

    def close(self) -> bytes:
        """Return the event that ends the open block, if there is one."""
        if self._open is None:
            return b""
        self._open = None
        return event({"type": "content_block_stop", "index": self._index})

    def text(self, text: str) -> bytes:
        """Return the events for the next text of the answer, which may be empty."""
        if self._open == "text" and text:
            return self._piece("text", text)
        self._blank.append(text)
        if not text or text.isspace():
            return b""
        whole = "".join(self._blank)
        self._blank.clear()
        return self._piece("text", whole)

    def _piece(self, kind: _BlockType, text: str) -> bytes:
        begun = b"" if self._open == kind else self.close() + self._start(_STARTS[kind])
        self._open = kind
        return begun + _DELTAS[kind] % (self._index, to_json(text, ensure_ascii=True))

    def _call(self, call: Call) -> bytes:
        """Return the events of a call, or of a part of it. A call is a block of its own."""
        events = b""
        if call.name:
            self.has_calls = True
            self._blank.clear()
            events += self.close() + self._start({**tool_use_block(self._job_id, call), "input": {}})
            self._open = "tool_use"
        if call.arguments:
            events += _DELTAS["tool_use"] % (self._index, to_json(call.arguments, ensure_ascii=True))
        if call.end is not None:
            self._open = None
            events += event({"type": "content_block_stop", "index": self._index, **warning_member(call)})
        return events

    def _start(self, block: Mapping[str, Any]) -> bytes:
        self._index += 1
        return event({"type": "content_block_start", "index": self._index, "content_block": block})
