"""The bytes of a tokenizer's tokens, in both alphabets that tokenizers use."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from penstock.contract.errors import ConfigError

_METASPACE = "\u2581"


def tokens_by_id(backend: Any) -> list[str]:
    """Return the tokens of a tokenizer, without added ones. Ids without a token have an empty text."""
    model, size = backend.model, backend.get_vocab_size(with_added_tokens=False)
    tokens: list[str | None] = [model.id_to_token(token_id) for token_id in range(size)]
    if None not in tokens:
        return [token or "" for token in tokens]
    # Some ids have no token, so others are above the number of tokens.
    from penstock.gpu_node.model.architecture.limits import MAX_VOCAB

    vocab: dict[str, int] = backend.get_vocab(with_added_tokens=False)
    token, largest = max(vocab.items(), key=lambda item: item[1])
    if largest >= MAX_VOCAB:
        raise ConfigError(f"the tokenizer's token {token!r} has the id {largest}; ids must be below {MAX_VOCAB:,}")
    sparse = [""] * (max(vocab.values()) + 1)
    for token, token_id in vocab.items():
        sparse[token_id] = token
    return sparse


def byte_level(tokens: Sequence[str]) -> list[bytes]:
    """Return the bytes of tokens in GPT-2's byte alphabet; UTF-8 for a token outside it."""
    # All tokens are converted at once: one by one, a vocabulary of 128,000 takes a tenth of a second.
    letters = np.frombuffer("".join(tokens).encode("utf-32-le"), "<u4")
    numbers = _ALPHABET[np.minimum(letters, len(_ALPHABET) - 1)]
    content, ends = numbers.astype(np.uint8).tobytes(), list(accumulate(map(len, tokens), initial=0))
    table = [content[start:end] for start, end in pairwise(ends)]
    foreign = np.flatnonzero(numbers < 0)
    # Not by np.unique, which would import numpy.ma: a node would start 30 ms later.
    for token_id in set((np.searchsorted(ends, foreign, side="right") - 1).tolist()):
        table[token_id] = tokens[token_id].encode()
    return table


def byte_fallback(tokens: Sequence[str]) -> list[bytes]:
    """Return the bytes of SentencePiece tokens: `<0x0A>` is a byte, the metaspace is a space."""
    return [_of_sentencepiece(token) for token in tokens]


def _of_sentencepiece(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes((int(token[3:5], 16),))
    return token.replace(_METASPACE, " ").encode()


_PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_SHIFTED = [byte for byte in range(256) if byte not in _PRINTABLE]
_ALPHABET = np.array([*(byte if byte in _PRINTABLE else -1 for byte in range(256)), *_SHIFTED, -1], np.int16)
"""The byte of each letter of GPT-2's byte alphabet, by code point; -1 for others. The last one is -1.

In the alphabet printable Latin-1 stands for itself. Other bytes are shifted past U+00FF in order.
"""
