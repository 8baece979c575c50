"""Log-probabilities as OpenAI's objects, in the two dialects, and those of prompts in vLLM's form."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from penstock.contract.logprobs import Logprob, TokenLogprobs

LOWEST = -9999.0
"""What stands for less, as OpenAI has it: JSON knows no infinity."""


def chat_logprobs(entries: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
    """Those of a chat's tokens."""
    if not entries:
        return None
    content = [{**_likely(_own(entry)), "top_logprobs": [*map(_likely, entry.top)]} for entry in entries]
    return {"content": content, "refusal": None}


def prompt_logprobs(entries: Sequence[TokenLogprobs]) -> list[dict[str, Any] | None]:
    """Those of a prompt's tokens, by their ids; None for the first one."""
    return [
        None
        if entry.logprob is None
        else {
            str(token_id): {"logprob": _number(value), "decoded_token": token.decode(errors="replace")}
            for token_id, value, token in (_own(entry), *entry.top)
        }
        for entry in entries
    ]


class ShownText:
    """What tokens show, as they come; a character that is split among them shows with the last of these."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def take_text(self, entries: Sequence[TokenLogprobs]) -> str:
        """What the next tokens show."""
        return self._decoder.decode(b"".join(entry.shown for entry in entries))


class CompletionTokens:
    """Those of one text's tokens as they come, with the place of each in the text."""

    def __init__(self) -> None:
        self._text = ShownText()
        self._offset = 0

    def take(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        """The next tokens'."""
        if not entries:
            return None
        return {
            "tokens": [_name(entry.token) for entry in entries],
            "token_logprobs": [None if entry.logprob is None else _number(entry.logprob) for entry in entries],
            "top_logprobs": [_by_name(entry) for entry in entries],
            "text_offset": [self._pass(entry) for entry in entries],
        }

    def _pass(self, entry: TokenLogprobs) -> int:
        offset = self._offset
        self._offset += len(self._text.take_text([entry]))
        return offset


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
