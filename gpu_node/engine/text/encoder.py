"""Texts to tokens, where what stands in many of them is encoded once."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from cachetools import LRUCache

from penstock.contract.errors import RequestError

MIN_CACHED_CHARS = 512
"""A shorter piece is encoded faster than it is worth remembering."""
MAX_CACHED_TOKENS = 1 << 20
"""Of all pieces that are remembered."""

Ids: TypeAlias = tuple[int, ...]


def token_ids_of(backend: Any, text: str, *, framed: bool) -> list[int]:
    """Tokens of a text; `framed`: with those that the model expects around it. `backend` is a tokenizers.Tokenizer.

    Raises RequestError for half a character.
    """
    try:
        # The library lets other threads run only while it encodes a batch, and this way works out no offsets besides.
        (encoding,) = backend.encode_batch_fast([text], add_special_tokens=framed)
    except TypeError:
        raise RequestError("text must be valid Unicode, without lone surrogates", param="prompt") from None
    ids: list[int] = encoding.ids
    return ids


class ChatEncoder:
    """Encodes rendered chats piece by piece: an added token parts what stands before it from what stands behind.

    Long pieces (system prompts, documents, earlier turns) are remembered, the ones used last. It may be called from any
    thread.
    """

    def __init__(self, backend: Any) -> None:
        """`backend` is a tokenizers.Tokenizer. One whose pieces depend on each other is asked for whole texts."""
        self._backend = backend
        self._separator = _separator(backend)
        self._known: LRUCache[str, Ids] = LRUCache(MAX_CACHED_TOKENS, getsizeof=len)
        self._lock = threading.Lock()

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, none added."""
        if self._separator is None or len(text) < MIN_CACHED_CHARS:
            return token_ids_of(self._backend, text, framed=False)
        return [token_id for piece in _pieces(self._separator, text) for token_id in self._encode_piece(piece)]

    def _encode_piece(self, piece: str) -> Sequence[int]:
        if len(piece) < MIN_CACHED_CHARS:
            return token_ids_of(self._backend, piece, framed=False)
        with self._lock:
            ids = self._known.get(piece)
        if ids is None:
            ids = tuple(token_ids_of(self._backend, piece, framed=False))
            with self._lock:
                if len(ids) <= MAX_CACHED_TOKENS:
                    self._known[piece] = ids
        return ids


def _pieces(separator: re.Pattern[str], text: str) -> Iterator[str]:
    """The text in long pieces and what stands between them; cut only before and behind added tokens."""
    short: list[str] = []
    for part in separator.split(text):
        if len(part) < MIN_CACHED_CHARS:
            short.append(part)
            continue
        if short:
            yield "".join(short)
            short.clear()
        yield part
    if short:
        yield "".join(short)


def _separator(backend: Any) -> re.Pattern[str] | None:
    """Finds added tokens in a text; None where the tokens of a piece depend on what stands around it.

    Known not to: byte level without a normalizer, with added tokens that take nothing from their neighbours.
    """
    added = list(backend.get_added_tokens_decoder().values())
    if not added or backend.normalizer is not None or backend.encode_special_tokens:
        return None
    if any(token.lstrip or token.rstrip or token.single_word for token in added):
        return None
    spec: dict[str, Any] = (
        json.loads(backend.pre_tokenizer.__getstate__()) if backend.pre_tokenizer else {"type": "none"}
    )
    steps: list[dict[str, Any]] = spec["pretokenizers"] if spec["type"] == "Sequence" else [spec]
    if any(step.get("add_prefix_space") for step in steps) or all(step["type"] != "ByteLevel" for step in steps):
        return None
    # The longest first, as one may begin like another.
    contents = sorted((re.escape(token.content) for token in added), key=len, reverse=True)
    return re.compile(f"({'|'.join(contents)})")
