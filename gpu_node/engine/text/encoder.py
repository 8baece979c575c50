"""Tokenization with a cache of long pieces, such as system prompts, that many texts share."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from cachetools import LRUCache

from penstock.contract.errors import RequestError

MIN_CACHED_CHARS = 512
"""A shorter piece is encoded faster than it is looked up."""
MAX_CACHED_TOKENS = 1 << 20
"""Limit of the cache, over all pieces."""

Ids: TypeAlias = tuple[int, ...]
Owner: TypeAlias = tuple[str, str | None]
"""A tenant and the `cache_salt` of its request. Owners share no cached piece, so times tell nothing of other owners."""
NO_OWNER: Owner = ("", None)
"""The owner of texts that belong to no request."""


def token_ids_of(backend: Any, text: str, *, framed: bool) -> list[int]:
    """Encode a text; see `batch_token_ids_of`."""
    (ids,) = batch_token_ids_of(backend, [text], framed=framed)
    return ids


def batch_token_ids_of(backend: Any, texts: Sequence[str], *, framed: bool) -> list[list[int]]:
    """Encode texts; `framed`: with the special tokens that the model expects. `backend`: a tokenizers.Tokenizer.

    Raises RequestError for lone surrogates.
    """
    try:
        # The library releases the GIL only for batches; the fast variant also skips the offsets.
        encodings = backend.encode_batch_fast(list(texts), add_special_tokens=framed)
    except TypeError:
        raise RequestError("text must be valid Unicode, without lone surrogates", param="prompt") from None
    return [encoding.ids for encoding in encodings]


class ChatEncoder:
    """Encodes rendered chats piece by piece, cut at added tokens, which no other token crosses.

    Long pieces (system prompts, documents, earlier messages) are kept in an LRU cache. Thread-safe.
    """

    def __init__(self, backend: Any) -> None:
        """`backend`: a tokenizers.Tokenizer. If its pieces depend on their neighbors, whole texts are encoded."""
        self._backend = backend
        self._separator = _separator(backend)
        self._known: LRUCache[tuple[Owner, str], Ids] = LRUCache(MAX_CACHED_TOKENS, getsizeof=len)
        self._lock = threading.Lock()

    def encode(self, text: str, owner: Owner = NO_OWNER) -> list[int]:
        """Encode a text without adding special tokens."""
        if self._separator is None or len(text) < MIN_CACHED_CHARS:
            return token_ids_of(self._backend, text, framed=False)
        return [token_id for piece in _pieces(self._separator, text) for token_id in self._encode_piece(owner, piece)]

    def _encode_piece(self, owner: Owner, piece: str) -> Sequence[int]:
        if len(piece) < MIN_CACHED_CHARS:
            return token_ids_of(self._backend, piece, framed=False)
        with self._lock:
            ids = self._known.get((owner, piece))
        if ids is None:
            ids = tuple(token_ids_of(self._backend, piece, framed=False))
            with self._lock:
                if len(ids) <= MAX_CACHED_TOKENS:
                    self._known[owner, piece] = ids
        return ids


def _pieces(separator: re.Pattern[str], text: str) -> Iterator[str]:
    """Split a text at added tokens, into long pieces and the short text between them."""
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
    """Return a pattern of the added tokens; None if a piece's tokens may depend on its neighbors.

    They do not if the tokenizer is byte-level and no added token absorbs neighboring spaces. A normalizer is applied
    after the text is cut at the added tokens that are not normalized themselves: only these separate pieces then.
    """
    added = list(backend.get_added_tokens_decoder().values())
    if any(token.lstrip or token.rstrip or token.single_word for token in added):
        return None
    if backend.normalizer is not None:
        added = [token for token in added if not token.normalized]
    if not added or backend.encode_special_tokens:
        return None
    spec: dict[str, Any] = (
        json.loads(backend.pre_tokenizer.__getstate__()) if backend.pre_tokenizer else {"type": "none"}
    )
    steps: list[dict[str, Any]] = spec["pretokenizers"] if spec["type"] == "Sequence" else [spec]
    if any(step.get("add_prefix_space") for step in steps) or all(step["type"] != "ByteLevel" for step in steps):
        return None
    # Longest first, since one added token may be a prefix of another.
    contents = sorted((re.escape(token.content) for token in added), key=len, reverse=True)
    return re.compile(f"({'|'.join(contents)})")
