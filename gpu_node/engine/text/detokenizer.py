"""Incremental detokenization, at a constant cost per token, without splitting characters."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence


class Detokenizer:
    """The text of one choice. Bytes that do not yet form a whole UTF-8 character wait for the next token."""

    def __init__(self, token_bytes: Sequence[bytes], *, strip_first_space: bool = False) -> None:
        """`token_bytes[i]`: the bytes of token i; empty for special tokens."""
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip_next = strip_first_space
        self._is_plain = not strip_first_space
        """Whether no byte waits and no space is to be stripped. ASCII then bypasses the decoder, which is faster."""

    def push(self, token_ids: Iterable[int]) -> str:
        """Return the text that these tokens complete; may be empty."""
        return "".join(map(self.push_one, token_ids))

    def push_one(self, token_id: int) -> str:
        """Return the text that one token completes; may be empty."""
        piece = self._token_bytes[token_id]
        if self._is_plain and piece.isascii():
            return piece.decode()
        if self._strip_next and piece:
            self._strip_next = False
            piece = piece.removeprefix(b" ")
        text = self._decoder.decode(piece)
        self._is_plain = not (self._strip_next or self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        """Return U+FFFD for an incomplete character at the end, else an empty string."""
        return self._decoder.decode(b"", final=True)
