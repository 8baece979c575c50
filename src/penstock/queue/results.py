"""msgpack encoding of results and of tasks' outputs, and lazy access to their parts; see `wire.py`."""

from __future__ import annotations

import codecs
import json
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import msgpack

from penstock.contract.output import Choice, FinishReason, Outcome, Result, TokenLogprobs, Usage
from penstock.contract.tasks import Detokenized, Embedding, Entity, TaskOutput, TextRows, Tokenized
from penstock.queue.protocol_version import PROTOCOL_VERSION
from penstock.queue.wire import (
    MAX_BYTES,
    RowParts,
    WireError,
    array_header,
    binary,
    checked_map,
    logprobs_of,
    pack,
    rows_of,
    unpack_all,
    unpack_map,
    with_members,
)

# Lazy access to a packed result: parts are decoded on access, rows of log-probabilities one by one.
#
# Decoded at once, the log-probabilities of a long prompt take thirty times the memory and block the event loop.

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
            yield logprobs_of([row])[0]


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


# msgpack encoding of a task's output inside a job's result, and access to its parts.
#
# Texts and lists are byte strings: texts in UTF-8, tokens as int32, vectors as float32, token strings as one text and
# the positions where they end. So a reader takes a part of a million tokens without copying or decoding the others.

_INT: Final = "i"
_INT_BYTES = 4
_FLOAT: Final = "f"
_FLOAT_BYTES = 4
_TEXT_WINDOW_BYTES = 16 << 10
Number = TypeVar("Number", int, float)


class PackedOutput:
    """The output of a task, whose parts are decoded on access. Raises WireError for malformed values."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        """`fields`: the members of the output by name; byte strings may be memory views."""
        self.kind: str = _of_type(fields, "kind", str)
        self.num_tokens: int = _of_type(fields, "num", int, 0)
        self.max_model_len: int = _of_type(fields, "max_len", int, 0)
        self.has_strs = "ends" in fields
        self._text = _view(fields, "text")
        self._ids = _ints(fields, "tokens")
        self._ends = _ints(fields, "ends")
        self._strs = _view(fields, "strs")
        self._spans = _ints(fields, "spans")
        self.vector: memoryview[int] = _view(fields, "vector")
        """The bytes of an embedding, or of the rows of several texts: float32, little-endian."""
        self.row_tokens = _ints(fields, "row_tokens")
        """The tokens of each text; empty for the output of a single prompt."""
        self.labels: tuple[str, ...] = tuple(_of_type(fields, "labels", list, []))
        """The names of the numbers of a row."""
        self._entities = _view(fields, "entities")

    def text_parts(self) -> Iterator[str]:
        """Yield the text in parts."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for at in range(0, len(self._text), _TEXT_WINDOW_BYTES):
            yield decoder.decode(self._text[at : at + _TEXT_WINDOW_BYTES])
        yield decoder.decode(b"", final=True)

    def token_ids(self) -> Iterator[int]:
        """Yield the token ids."""
        return iter(self._ids)

    def token_strs(self) -> Iterator[str]:
        """Yield the tokens as the vocabulary spells them."""
        start = 0
        for end in self._ends:
            yield str(self._strs[start:end], "utf-8", "replace")
            start = end

    def spans(self) -> Iterator[tuple[int, int] | None]:
        """Yield where in the text each token stands; None for a token that is not of the text."""
        for at in range(0, len(self._spans) - 1, 2):
            yield None if self._spans[at] < 0 else (self._spans[at], self._spans[at + 1])

    def floats(self) -> array[float]:
        """Return the numbers of an embedding."""
        if len(self.vector) % _FLOAT_BYTES:
            raise WireError(f"a vector has {len(self.vector)} bytes, not a multiple of {_FLOAT_BYTES}")
        values = array(_FLOAT)
        values.frombytes(self.vector)
        return _little_endian(values)

    @property
    def num_rows(self) -> int:
        """The number of texts whose rows it has; 1 for the embedding of a prompt."""
        return len(self.row_tokens) or 1

    def rows(self) -> Iterator[array[float]]:
        """Yield the numbers of each text: an embedding, a score, or the scores of labels. Raises WireError."""
        values = self.floats()
        width, rest = divmod(len(values), self.num_rows)
        if rest:
            raise WireError(f"{len(values)} numbers are no rows of {self.num_rows} texts")
        for at in range(self.num_rows):
            yield values[at * width : (at + 1) * width]

    def entities(self) -> list[list[dict[str, Any]]]:
        """Return for each text what a model that labels tokens found. Raises WireError."""
        if not self._entities:
            return []
        try:
            found = json.loads(bytes(self._entities))
        except ValueError as error:
            raise WireError(f"entities are not JSON: {error}") from error
        if not isinstance(found, list) or len(found) != self.num_rows:
            raise WireError(f"entities are not those of {self.num_rows} texts")
        return found

    def _text_rows(self) -> TextRows:
        entities = tuple(
            tuple(Entity(one["entity_group"], one["score"], one["start"], one["end"], one["word"]) for one in of_text)
            for of_text in self.entities()
        )
        rows = () if entities else tuple(map(tuple, self.rows()))
        return TextRows(self.kind, rows, tuple(self.row_tokens), self.labels, entities)

    def whole(self) -> TaskOutput:
        """Return the decoded output. Raises WireError for an unknown kind."""
        if self.kind == "detokenize":
            return Detokenized("".join(self.text_parts()))
        if self.row_tokens and not (self.kind == "embed" and self.num_rows == 1):
            return self._text_rows()
        if self.kind == "embed":
            return Embedding(tuple(self.floats()), self.num_tokens)
        if self.kind != "tokenize":
            raise WireError(f"unknown kind of output {self.kind[:64]!r}")
        strs = tuple(self.token_strs()) if self.has_strs else None
        spans = tuple(self.spans()) if self._spans else None
        return Tokenized(self.num_tokens, self.max_model_len, tuple(self.token_ids()), strs, spans)


def encode_tokenized(
    num_tokens: int,
    max_model_len: int,
    token_ids: Sequence[int] | None,
    token_strs: Iterable[str] | None,
    spans: Iterable[tuple[int, int] | None] | None = None,
) -> bytes:
    """Encode the output of `Tokenize`. None stands for what was not requested."""
    members: list[tuple[str, Iterable[bytes | bytearray]]] = []
    if token_ids is not None:
        members.append(("tokens", binary(_little_endian(array(_INT, token_ids)).tobytes())))
    if token_strs is not None:
        strs, ends = bytearray(), array(_INT)
        for token in token_strs:
            strs += token.encode()
            ends.append(len(strs))
        members += [("strs", binary(strs)), ("ends", binary(_little_endian(ends).tobytes()))]
    if spans is not None:
        places = array(_INT, (place for span in spans for place in span or (-1, -1)))
        members.append(("spans", binary(_little_endian(places).tobytes())))
    return with_members(pack({"kind": "tokenize", "num": num_tokens, "max_len": max_model_len}), members)


def encode_detokenized(text: str) -> bytes:
    """Encode the output of `Detokenize`."""
    return pack({"kind": "detokenize", "text": text.encode()})


def encode_embedding(vector: bytes, num_tokens: int) -> bytes:
    """Encode the output of `Embed`. `vector`: float32, little-endian."""
    return pack({"kind": "embed", "num": num_tokens, "vector": vector})


def encode_text_rows(
    kind: str, rows: bytes, num_tokens: Sequence[int], labels: Sequence[str] = (), entities: str = ""
) -> bytes:
    """Encode the output of a task for an encoder: float32 rows, little-endian, one for each text; or entities as JSON.

    num_tokens: the tokens of each text.
    """
    fields: dict[str, Any] = {"kind": kind, "num": sum(num_tokens)}
    fields["row_tokens"] = _little_endian(array(_INT, num_tokens)).tobytes()
    fields["vector"] = rows
    if labels:
        fields["labels"] = list(labels)
    if entities:
        fields["entities"] = entities.encode()
    return pack(fields)


def _little_endian(values: array[Number]) -> array[Number]:
    if sys.byteorder == "big":
        values.byteswap()
    return values


def _ints(fields: Mapping[str, Any], name: str) -> memoryview[int]:
    data = _view(fields, name)
    if len(data) % _INT_BYTES:
        raise WireError(f"output field {name!r} has {len(data)} bytes, not a multiple of {_INT_BYTES}")
    if sys.byteorder == "big":
        values = array(_INT)
        values.frombytes(data)
        return memoryview(_little_endian(values))
    return data.cast(_INT)


def _view(fields: Mapping[str, Any], name: str) -> memoryview[int]:
    value = fields.get(name, b"")
    if not isinstance(value, (bytes, memoryview)):
        raise WireError(f"output field {name!r} is a {type(value).__name__}")
    return memoryview(value)


def _of_type(fields: Mapping[str, Any], name: str, kind: type, default: Any = None) -> Any:
    value = fields.get(name, default)
    if type(value) is not kind:
        raise WireError(f"output field {name!r} is a {type(value).__name__}")
    return value


# msgpack encoding and decoding of results; see `wire.py`.


def encode_result(
    choices: tuple[Choice, ...],
    usage: Usage,
    cuts: list[tuple[int, int, int]],
    prompt_logprobs: Sequence[TokenLogprobs] | RowParts = (),
    logprobs: Sequence[RowParts] = (),
    *,
    output: bytes = b"",
) -> bytes:
    """Encode the part of a result that the node produces. The job's hash holds the rest: outcome and times.

    `logprobs` are the choices' log-probabilities, if they are packed already; else those in `choices` are packed.
    `output` is the packed output of the job's task, if it has one.
    """
    rows = logprobs or [rows_of(choice.logprobs) for choice in choices]
    prompt_rows = prompt_logprobs if isinstance(prompt_logprobs, RowParts) else rows_of(prompt_logprobs)
    members: list[tuple[str, Iterable[bytes]]] = [
        ("choices", (array_header(len(choices)), *map(_packed_choice, choices, rows))),
        ("u", (pack(usage.counts()),)),
        ("cuts", (pack(cuts),)),
    ]
    if prompt_rows.num_rows:
        members.append(("q", prompt_rows.array_parts))
    if output:
        members.append(("o", (output,)))
    return with_members(pack({"v": PROTOCOL_VERSION}), members)


def decode_result(data: bytes, job_id: str, outcome: Outcome, times_ms: tuple[int, int, int, int]) -> Result:
    """Decode a result from the node's bytes, with `outcome` and `times_ms` from the job's record.

    `times_ms` is (submitted, taken, first token, finished). Raises WireError.
    """
    m = unpack_map(data)
    try:
        choices = tuple(_choice_of(fields) for fields in m["choices"])
        cuts = tuple((int(c), int(t), int(s)) for c, t, s in m["cuts"])
        prompt = logprobs_of(m.get("q", []))
        output = PackedOutput(checked_map(m["o"])).whole() if "o" in m else None
        usage = Usage(*m["u"])
        return Result(job_id, outcome, choices, usage, *times_ms, cuts=cuts, prompt_logprobs=prompt, output=output)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise WireError(f"not a result: {error!r}") from error


def _packed_choice(choice: Choice, rows: RowParts) -> bytes:
    data = pack({"c": choice.index, "s": choice.text, "t": choice.token_ids, "f": choice.finish_reason})
    return with_members(data, [("l", rows.array_parts)]) if rows.num_rows else data


def _choice_of(fields: dict[str, Any]) -> Choice:
    c, s, t, f = (fields[key] for key in "cstf")
    return Choice(c, s, tuple(t), f, logprobs_of(fields.get("l", []), t))
