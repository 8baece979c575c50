"""Reads the answer to one request while it arrives: status, server-sent events, tokens and their times."""

from __future__ import annotations

import json
from typing import Any

from penstock.cli.bench.records import RequestRecord

MAX_WHOLE_BYTES = 16 << 20
"""Bytes that are read of an answer that is no event stream, such as an error."""
_MAX_DETAIL = 300
_TEXTS = ("content", "reasoning_content", "reasoning", "tool_calls", "text", "function_call")
"""Members of a choice or of its delta that hold generated tokens."""


class AnswerReader:
    """Fills a request's record from the body of its answer.

    It accepts the framing of real servers. Lines may end with CRLF, and comments may come between them. An event may
    have several data lines, and the last one no empty line after it. `[DONE]`, and even all events, may be absent.
    """

    def __init__(self, record: RequestRecord) -> None:
        self.record = record
        self.is_complete = False
        """Whether `[DONE]` came."""
        self._status = 0
        self._is_stream = False
        self._rest = b""
        self._data: list[bytes] = []

    def begin(self, status: int, content_type: str) -> None:
        """Note the head of the answer."""
        self._status = status
        self._is_stream = status == 200 and "event-stream" in content_type

    def feed(self, data: bytes, now_s: float) -> None:
        """Read the next bytes of the body. Errors are noted in the record."""
        if not self._is_stream:
            if len(self._rest) < MAX_WHOLE_BYTES:
                self._rest += data
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._read_line(line.rstrip(b"\r"), now_s)

    def end(self, now_s: float) -> None:
        """Note the end of the body. A missing end or token is an error in the record."""
        record = self.record
        if self._status != 200:
            self.fail(f"HTTP {self._status}", _message_of(self._rest))
        elif not self._is_stream:
            self._read_event(self._rest, now_s)
        else:
            self._read_line(self._rest, now_s)
            self._read_line(b"", now_s)
        if not record.error and not self.is_complete and not record.finish_reason:
            self.fail("stream ended early", "neither a finish_reason nor [DONE] came")
        elif not record.error and not record.token_events_s:
            # Tokens without text, such as an end of the sequence at once, are an answer too if the server counts them.
            if not record.usage_tokens:
                self.fail("no token in the answer")
            else:
                record.token_events_s.append(record.end_s or now_s)

    def fail(self, error: str, detail: str = "") -> None:
        """Note a failure, unless there was one before."""
        if not self.record.error:
            self.record.error, self.record.detail = error, detail[:_MAX_DETAIL]

    def _read_line(self, line: bytes, now_s: float) -> None:
        if line.startswith(b"data:"):
            self._data.append(line[5:])
        elif not line and self._data:
            event, self._data = b"\n".join(self._data), []
            self._read_event(event, now_s)

    def _read_event(self, event: bytes, now_s: float) -> None:
        if event.strip() == b"[DONE]":
            self.is_complete = True
            return
        try:
            fields = json.loads(event)
        except ValueError:
            self.fail("event is not JSON", event[:_MAX_DETAIL].decode(errors="replace"))
            return
        if not isinstance(fields, dict):
            self.fail("event is not a JSON object", event[:_MAX_DETAIL].decode(errors="replace"))
            return
        if fields.get("error"):
            self.fail(*_error_of(fields["error"]))
            return
        if isinstance(usage := fields.get("usage"), dict):
            self._read_usage(usage)
        choices = fields.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, dict):
                self._read_choice(choice, now_s)

    def _read_choice(self, choice: dict[str, Any], now_s: float) -> None:
        record, record.end_s = self.record, now_s
        part = choice.get("delta") or choice.get("message") or choice
        if isinstance(part, dict) and any(part.get(name) for name in _TEXTS):
            record.token_events_s.append(now_s)
        record.finish_reason = choice.get("finish_reason") or record.finish_reason

    def _read_usage(self, usage: dict[str, Any]) -> None:
        # Servers that report usage in every event send growing counts, so the last one counts.
        for name, field in (("prompt_tokens", "prompt_tokens"), ("completion_tokens", "usage_tokens")):
            if isinstance(count := usage.get(name), int):
                setattr(self.record, field, count)


def _error_of(error: Any) -> tuple[str, str]:
    """Return the kind and the message of an error that came as an event."""
    if isinstance(error, dict):
        kind = error.get("code") or error.get("type") or "unknown"
        return f"error event: {kind}", str(error.get("message", ""))
    return "error event", str(error)


def _message_of(body: bytes) -> str:
    """Return the message of an error answer: `error.message`, `message` or `detail`, else the body itself."""
    text = body[: 4 * _MAX_DETAIL].decode(errors="replace")
    try:
        fields = json.loads(body)
    except ValueError:
        return text
    error = fields.get("error", fields) if isinstance(fields, dict) else fields
    if isinstance(error, dict):
        return str(error.get("message") or error.get("detail") or text)
    return str(error)
