"""Lazy access to a packed result: parts are decoded on access, rows of log-probabilities one by one.

Decoded at once, the log-probabilities of a long prompt take thirty times the memory and block the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgpack

from penstock.contract.logprobs import TokenLogprobs
from penstock.contract.output import FinishReason, Outcome, Usage
from penstock.queue import packed_logprobs
from penstock.queue.msgpack_codec import MAX_BYTES, WireError, unpack_all
from penstock.queue.protocol_version import PROTOCOL_VERSION
from penstock.queue.task_output import PackedOutput

Fetches = Callable[[int], bool]
"""Decides by the size of a large result whether to fetch it now."""
_BIN_HEADERS = {0xC4: 2, 0xC5: 3, 0xC6: 5}
"""The first byte of a byte string in msgpack → the bytes of its header."""
_WINDOW_BYTES = 64 << 10
"""Bytes of rows that an unpacker buffers at a time."""


class Span(NamedTuple):
    """Start and end of a value in the result's bytes."""

    start: int
    end: int


class PackedRows:
    """Log-probabilities of several tokens, in order. It may be iterated over repeatedly; each time decodes anew."""

    def __init__(self, data: bytes, span: Span | None) -> None:
        self._data = data
        self._span = span

    def __bool__(self) -> bool:
        # An empty msgpack array is one byte.
        return self._span is not None and self._span.end - self._span.start > 1

    def __iter__(self) -> Iterator[TokenLogprobs]:
        if self._span is None:
            return
        for row in _items_of(self._data, self._span):
            yield packed_logprobs.from_wire([row])[0]


class PackedChoice:
    """One choice of a packed result."""

    def __init__(self, data: bytes, spans: dict[str, Span]) -> None:
        self._data = data
        self._spans = spans
        self.index: int = self._value("c")
        self.finish_reason: FinishReason | None = self._value("f")
        self.logprobs = PackedRows(data, spans.get("l"))

    @property
    def text(self) -> str:
        """The choice's text, decoded at each access."""
        text: str = self._value("s")
        return text

    @property
    def token_ids(self) -> Sequence[int]:
        """The choice's token ids, decoded at each access."""
        token_ids: list[int] = self._value("t")
        return token_ids

    def _value(self, name: str) -> Any:
        return _value_at(self._data, self._spans[name])


class PackedResult:
    """A packed result with the positions of its parts. Raises WireError for malformed bytes."""

    def __init__(self, data: bytes | None, job_id: str, outcome: Outcome, *, num_left_bytes: int = 0) -> None:
        """num_left_bytes: the size of a result that was left in Redis, so that this is only the end of its job."""
        self.job_id = job_id
        self.outcome = outcome
        self.is_fetched = not num_left_bytes
        self.num_bytes = num_left_bytes or len(data or b"")
        self.usage: Usage | None = None
        self.choices: tuple[PackedChoice, ...] = ()
        self._data = b""
        self._cuts: Span | None = None
        self.prompt_logprobs = PackedRows(b"", None)
        self.output: PackedOutput | None = None
        """What the job's task returned; None for a job that generates text."""
        if data is not None:
            try:
                self._read(data)
            except (KeyError, TypeError, ValueError, msgpack.UnpackException) as error:
                raise WireError(f"not a result: {error!r}") from error

    def _read(self, data: bytes) -> None:
        if len(data) > MAX_BYTES:
            raise WireError(f"a result of {len(data)} bytes exceeds {MAX_BYTES}")
        unpacker = msgpack.Unpacker(max_buffer_size=max(len(data), 1), max_ext_len=0)
        unpacker.feed(data)
        choices: list[dict[str, Span]] = []

        def read_choices() -> None:
            choices.extend(_members(unpacker) for _ in range(unpacker.read_array_header()))

        output: dict[str, Span] = {}

        def read_output() -> None:
            output.update(_members(unpacker))

        spans = _members(unpacker, {"choices": read_choices, "o": read_output})
        if (version := _value_at(data, spans["v"])) != PROTOCOL_VERSION:
            raise WireError(f"protocol version {version!r} is not {PROTOCOL_VERSION}")
        self.choices = tuple(PackedChoice(data, of_choice) for of_choice in choices)
        self.usage = Usage(*_value_at(data, spans["u"]))
        self.prompt_logprobs = PackedRows(data, spans.get("q"))
        if "o" in spans:
            self.output = PackedOutput({name: _value_or_view(data, span) for name, span in output.items()})
        self._data, self._cuts = data, spans.get("cuts")

    def cuts(self) -> Iterator[tuple[int, int, int]]:
        """Return (choice, number of tokens, number of characters) of each chunk, decoded one by one."""
        cuts = iter(()) if self._cuts is None else _items_of(self._data, self._cuts)
        return ((choice, num_tokens, num_chars) for choice, num_tokens, num_chars in cuts)


def _members(unpacker: Any, readers: dict[str, Callable[[], None]] | None = None) -> dict[str, Span]:
    """Return the spans of a map's values. For the names in `readers`, that function reads the value instead."""
    spans: dict[str, Span] = {}
    for _ in range(unpacker.read_map_header()):
        name = unpacker.unpack()
        start = unpacker.tell()
        (readers or {}).get(name, unpacker.skip)()
        spans[name] = Span(start, unpacker.tell())
    return spans


def _value_at(data: bytes, span: Span) -> Any:
    (value,) = unpack_all(data[span.start : span.end])
    return value


def _items_of(data: bytes, span: Span) -> Iterator[Any]:
    """Yield the items of an array, decoded one by one. Raises WireError if they end early."""
    at, end = span
    unpacker = msgpack.Unpacker(max_buffer_size=MAX_BYTES, max_ext_len=0)
    at = _feed(unpacker, data, at, end)
    for _ in range(unpacker.read_array_header()):
        while True:
            try:
                item = unpacker.unpack()
                break
            except msgpack.OutOfData:
                if at >= end:
                    raise WireError("an array of a result ends early") from None
                at = _feed(unpacker, data, at, end)
        yield item


def _value_or_view(data: bytes, span: Span) -> Any:
    """Return a value; of a byte string, a view, since it may have megabytes."""
    header = _BIN_HEADERS.get(data[span.start])
    return memoryview(data)[span.start + header : span.end] if header is not None else _value_at(data, span)


def _feed(unpacker: Any, data: bytes, at: int, end: int) -> int:
    """Feed the next window of bytes to an unpacker; return its end."""
    until = min(end, at + _WINDOW_BYTES)
    unpacker.feed(memoryview(data)[at:until])
    return until
