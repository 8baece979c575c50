"""JSON written in parts, so that memory never holds a whole answer: texts, token ids and log-probabilities.

Log-probabilities have the form of OpenAI's objects for chats and completions; those of prompts have vLLM's form.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from pydantic_core import to_json

from penstock.contract.output import Logprob, Result, TokenLogprobs
from penstock.queue.results import PackedResult

ROWS_PER_PART = 16
"""Array rows that are written at once. A row of log-probabilities takes about 1 kB."""
CHARS_PER_PART = 16 << 10
"""Characters of a string that are written at once."""

T = TypeVar("T")


class Lazy:
    """A value that is created only when it is written. Each writing calls `make` again."""

    def __init__(self, make: Callable[[], Iterable[Any]]) -> None:
        self.make = make


class Rows(Lazy):
    """A lazy array of values that contain nothing lazy."""


class Items(Lazy):
    """A lazy array of values that may contain lazy values."""


class Text(Lazy):
    """A lazy string, made in pieces."""


def json_parts(value: Any, *, ensure_ascii: bool = False) -> Iterator[bytes]:
    """Yield the JSON of a value in parts of several kilobytes.

    Objects and `Items` may contain lazy values. Plain lists may not. `ensure_ascii` escapes all other characters.
    """
    dump = partial(to_json, ensure_ascii=ensure_ascii)
    if isinstance(value, dict):
        yield from _object_parts(value, dump, ensure_ascii)
    elif isinstance(value, Rows):
        yield from _joined(b"[", (dump(rows)[1:-1] for rows in _batches(value.make())), b"]")
    elif isinstance(value, Items):
        yield b"["
        for i, item in enumerate(value.make()):
            if i:
                yield b","
            yield from json_parts(item, ensure_ascii=ensure_ascii)
        yield b"]"
    elif isinstance(value, Text):
        yield b'"'
        for text in value.make():
            for at in range(0, len(text), CHARS_PER_PART):
                yield dump(text[at : at + CHARS_PER_PART])[1:-1]
        yield b'"'
    else:
        yield dump(value)


def plain(value: Any) -> Any:
    """Return the value with each lazy value replaced by its content."""
    if isinstance(value, dict):
        return {name: plain(member) for name, member in value.items()}
    if isinstance(value, Text):
        return "".join(value.make())
    if isinstance(value, Lazy):
        return [plain(item) for item in value.make()]
    return value


def _object_parts(value: dict[str, Any], dump: Callable[[Any], bytes], ensure_ascii: bool) -> Iterator[bytes]:
    if not any(isinstance(member, (dict, Lazy)) for member in value.values()):
        yield dump(value)
        return
    yield b"{"
    for i, (name, member) in enumerate(value.items()):
        yield (b"," if i else b"") + dump(name) + b":"
        yield from json_parts(member, ensure_ascii=ensure_ascii)
    yield b"}"


def _joined(before: bytes, parts: Iterable[bytes], after: bytes) -> Iterator[bytes]:
    yield before
    for i, part in enumerate(parts):
        yield b"," + part if i else part
    yield after


def _batches(rows: Iterable[T]) -> Iterator[list[T]]:
    left = iter(rows)
    while batch := list(islice(left, ROWS_PER_PART)):
        yield batch


# Lines of JSON Lines.

_LINE_ENDS = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)}
"""Characters that JSON may have unescaped, and at which some readers of lines, such as `str.splitlines`, end a line."""


def on_one_line(text: str) -> str:
    """Return JSON text with the characters escaped at which any reader ends a line."""
    return text.translate(_LINE_ENDS)


def json_line(value: Any) -> bytes:
    """Return a value as a line of a JSON Lines file."""
    return on_one_line(json.dumps(value, ensure_ascii=False)).encode() + b"\n"


# Token ids.


class TokenIds(NamedTuple):
    """The token ids that a stream object reports."""

    of_choice: Sequence[int]
    """Ids of the choice's new tokens."""
    of_prompt: Sequence[int] | None = None
    """Ids of the whole prompt, in the first object that shows them."""


def prompt_ids_of(result: Result | PackedResult) -> Rows:
    """Return the ids of a result's prompt, which are decoded when they are written."""
    return Rows(lambda: (entry.token_ids[0] for entry in result.prompt_logprobs))


# Log-probabilities, as OpenAI's objects for chats and completions, and those of prompts in vLLM's form.

LOWEST = -9999.0
"""The lowest log-probability that is reported, as OpenAI does, because JSON has no infinity."""


def chat_logprobs(entries: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
    """Return the `logprobs` object of a chat choice for these tokens, or None without tokens."""
    if not entries:
        return None
    return {"content": [*map(_chat_row, entries)], "refusal": None}


def whole_chat_logprobs(entries: Iterable[TokenLogprobs]) -> dict[str, Any]:
    """Return the `logprobs` object of a whole chat choice. Its rows are created when they are written."""
    return {"content": Rows(lambda: chat_rows(entries)), "refusal": None}


def chat_rows(entries: Iterable[TokenLogprobs]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a `logprobs` object, one for each token."""
    return map(_chat_row, entries)


def _chat_row(entry: TokenLogprobs) -> dict[str, Any]:
    return {**_token_object(_own(entry)), "top_logprobs": [*map(_token_object, entry.top)]}


def prompt_logprobs(entries: Iterable[TokenLogprobs]) -> Iterator[dict[str, Any] | None]:
    """Yield vLLM's `prompt_logprobs`, one object by token id for each token of a prompt; None for the first token."""
    for entry in entries:
        if entry.logprob is None:
            yield None
            continue
        yield {
            str(token_id): {
                "logprob": value if value > LOWEST else LOWEST,
                "decoded_token": token if isinstance(token, str) else token.decode(errors="replace"),
            }
            for token_id, value, token in zip(entry.token_ids, entry.values, entry.tokens, strict=True)
        }


class ShownText:
    """Decodes tokens to text one by one. A character that several tokens share appears with the last of them."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def take_text(self, entries: Sequence[TokenLogprobs]) -> str:
        """Return the text of the next tokens."""
        return self._decoder.decode(b"".join(entry.shown for entry in entries))


class PromptEcho:
    """The text of a prompt, decoded from its tokens. The text is kept after the first reading."""

    def __init__(self, entries: Iterable[TokenLogprobs]) -> None:
        self.entries = entries
        self._text: str | None = None

    def parts(self) -> Iterator[str]:
        """Yield the text in parts: by token at the first reading, as a whole later."""
        if self._text is not None:
            yield self._text
            return
        shown, parts = ShownText(), []
        for entry in self.entries:
            parts.append(shown.take_text([entry]))
            yield parts[-1]
        self._text = "".join(parts)

    def __len__(self) -> int:
        return sum(map(len, self.parts()))


class CompletionTokens:
    """Builds the `logprobs` objects of one streamed completion and tracks each token's offset in its text."""

    def __init__(self, offset: int = 0) -> None:
        """`offset`: the position in the text, in characters, at which the first token begins."""
        self._text = ShownText()
        self._offset = offset

    def take(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        """Return the `logprobs` object of the next tokens, or None without tokens."""
        if not entries:
            return None
        whole = {name: [*make(entries)] for name, make in _COLUMNS.items()}
        return {**whole, "text_offset": [self.skip(entry) for entry in entries]}

    def skip(self, entry: TokenLogprobs) -> int:
        """Advance past a token's text and return the offset at which it begins."""
        offset = self._offset
        self._offset += len(self._text.take_text([entry]))
        return offset


def whole_completion_logprobs(entries: Iterable[TokenLogprobs], offset: int) -> dict[str, Any]:
    """Return the `logprobs` object of a whole completion. Its lists are created when they are written.

    The first token begins at `offset`, in characters, of the text.
    """
    whole = {name: Rows(partial(make, entries)) for name, make in _COLUMNS.items()}
    return {**whole, "text_offset": Rows(lambda: map(CompletionTokens(offset).skip, entries))}


def _names(entries: Iterable[TokenLogprobs]) -> Iterator[str]:
    return (_name(entry.token) for entry in entries)


def _values(entries: Iterable[TokenLogprobs]) -> Iterator[float | None]:
    return (None if entry.logprob is None else _number(entry.logprob) for entry in entries)


def _tops(entries: Iterable[TokenLogprobs]) -> Iterator[dict[str, float] | None]:
    return map(_by_name, entries)


_COLUMNS: dict[str, Callable[[Iterable[TokenLogprobs]], Iterator[Any]]] = {
    "tokens": _names,
    "token_logprobs": _values,
    "top_logprobs": _tops,
}
"""The lists in a completion's `logprobs` object, each with one value for each token."""


def _by_name(entry: TokenLogprobs) -> dict[str, float] | None:
    if entry.logprob is None:
        return None
    return {_name(token): _number(value) for _, value, token in (*entry.top, _own(entry))}


def _own(entry: TokenLogprobs) -> Logprob:
    return Logprob(entry.token_ids[0], LOWEST if entry.logprob is None else entry.logprob, entry.token)


def _token_object(entry: Logprob) -> dict[str, Any]:
    token = entry.token.decode(errors="replace")
    return {"token": token, "logprob": _number(entry.logprob), "bytes": list(entry.token)}


def _name(token: bytes) -> str:
    """Return a token's text. Incomplete characters are written as `bytes:…`, as OpenAI does, to keep names unique."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _number(value: float) -> float:
    return value if value > LOWEST else LOWEST
