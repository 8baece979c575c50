"""Log-probabilities as OpenAI's objects, in the two dialects, and those of prompts in vLLM's form."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from penstock.contract.logprobs import Logprob, TokenLogprobs
from penstock.producer.openai.json_parts import Rows

LOWEST = -9999.0
"""What stands for less, as OpenAI has it: JSON knows no infinity."""


def chat_logprobs(entries: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
    """Those of a chat's tokens."""
    if not entries:
        return None
    return {"content": [*map(_chat_row, entries)], "refusal": None}


def whole_chat_logprobs(entries: Iterable[TokenLogprobs]) -> dict[str, Any]:
    """The same of all tokens, made as they are written."""
    return {"content": Rows(lambda: map(_chat_row, entries)), "refusal": None}


def _chat_row(entry: TokenLogprobs) -> dict[str, Any]:
    return {**_likely(_own(entry)), "top_logprobs": [*map(_likely, entry.top)]}


def prompt_logprobs(entries: Iterable[TokenLogprobs]) -> Iterator[dict[str, Any] | None]:
    """Those of a prompt's tokens, by their ids; None for the first one."""
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
    """What tokens show, as they come; a character that is split among them shows with the last of these."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def take_text(self, entries: Sequence[TokenLogprobs]) -> str:
        """What the next tokens show."""
        return self._decoder.decode(b"".join(entry.shown for entry in entries))


class PromptEcho:
    """A prompt's text as its tokens show it, kept once it was read."""

    def __init__(self, entries: Iterable[TokenLogprobs]) -> None:
        self.entries = entries
        self._text: str | None = None

    def parts(self) -> Iterator[str]:
        """The text, a token at a time where it is read for the first time."""
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
    """Those of one text's tokens as they come, with the place of each in the text."""

    def __init__(self, offset: int = 0) -> None:
        """The first token begins at `offset` of the text."""
        self._text = ShownText()
        self._offset = offset

    def take(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        """The next tokens'."""
        if not entries:
            return None
        whole = {name: [*make(entries)] for name, make in _COLUMNS.items()}
        return {**whole, "text_offset": [self.skip(entry) for entry in entries]}

    def skip(self, entry: TokenLogprobs) -> int:
        """Count a token's text; where it begins."""
        offset = self._offset
        self._offset += len(self._text.take_text([entry]))
        return offset


def whole_completion_logprobs(entries: Iterable[TokenLogprobs], offset: int) -> dict[str, Any]:
    """The same of all tokens, made as they are written; the first one begins at `offset` of the text."""
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
"""What a completion says of its tokens, each in a list of its own."""


def _by_name(entry: TokenLogprobs) -> dict[str, float] | None:
    if entry.logprob is None:
        return None
    return {_name(token): _number(value) for _, value, token in (*entry.top, _own(entry))}


def _own(entry: TokenLogprobs) -> Logprob:
    return Logprob(entry.token_ids[0], LOWEST if entry.logprob is None else entry.logprob, entry.token)


def _likely(one: Logprob) -> dict[str, Any]:
    token = one.token.decode(errors="replace")
    return {"token": token, "logprob": _number(one.logprob), "bytes": list(one.token)}


def _name(token: bytes) -> str:
    """A token's text; what is no whole characters is written as OpenAI writes it, so that no two have one name."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _number(value: float) -> float:
    return value if value > LOWEST else LOWEST
