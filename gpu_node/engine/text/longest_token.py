"""The most bytes of a text that one token of a tokenizer stands for: a text that is longer cannot fit the context."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

NORMAL_FORM_SHRINKS = 4
"""How many times longer a text may be than its form NFC or NFD, in UTF-8: U+212A (Kelvin) has 3 bytes and becomes K.
The most is 3.5; a test compares all of Unicode."""
_UTF8_BYTES = frozenset((*range(0xC0), *range(0xC2, 0xF5)))
"""The bytes that texts in UTF-8 have."""
_KEEPING = frozenset(("ByteLevel", "Metaspace", "Digits", "Punctuation", "UnicodeScripts", "FixedLength"))
"""Steps before the model that keep every character of a text. The others may drop some, and so may `Split`."""


def longest_token(backend: Any, tokens: Sequence[str], token_bytes: Sequence[bytes], *, is_byte_level: bool) -> int:
    """Return the most bytes of a text that become one token; 0 if there is no bound, or none is known.

    `tokens` are those of the vocabulary, and `token_bytes` the bytes for which they stand. There is no bound if a step
    before the model drops characters, or if an added token takes the spaces beside it. Nor is there one without tokens
    for all bytes: then an unknown token may stand for text of any length.
    """
    added = backend.get_added_tokens_decoder().values()
    shrinks = math.prod(map(_shrinks, _steps(backend.normalizer, "normalizers")))
    if not shrinks or any(token.lstrip or token.rstrip for token in added):
        return 0
    if not all(map(_keeps_text, _steps(backend.pre_tokenizer, "pretokenizers"))):
        return 0
    if is_byte_level:
        known = {one[0] for one in token_bytes if len(one) == 1}
        lengths = [len(one) for one in token_bytes]
    else:
        of_bytes = {f"<0x{byte:02X}>": byte for byte in range(256)} if _falls_back(backend) else {}
        known = {of_bytes[token] for token in tokens if token in of_bytes}
        # A text may also have the mark that stands for a space, of 3 bytes.
        lengths = [len(token.encode()) for token in tokens]
    if not known >= _UTF8_BYTES:
        return 0
    return shrinks * max(*lengths, *(len(token.content.encode()) for token in added), 1)


def _falls_back(backend: Any) -> bool:
    """Return whether the bytes of unknown characters are tokens."""
    return bool(getattr(backend.model, "byte_fallback", False))


def _steps(part: Any, members: str) -> list[Mapping[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer."""
    if part is None:
        return []
    spec = json.loads(part.__getstate__())
    found: list[Mapping[str, Any]] = spec[members] if spec["type"] == "Sequence" else [spec]
    return found


def _shrinks(step: Mapping[str, Any]) -> int:
    """Return how many times longer a text may be than what the normalizer makes of it; 0 for no bound."""
    match step["type"]:
        case "NFC" | "NFD":
            return NORMAL_FORM_SHRINKS
        case "Prepend" | "ByteLevel":
            return 1
        case "Replace":
            pattern = step["pattern"].get("String")
            return int(pattern is not None and len(pattern.encode()) <= len(step["content"].encode()))
    return 0


def _keeps_text(step: Mapping[str, Any]) -> bool:
    return step["type"] in _KEEPING or (step["type"] == "Split" and step["behavior"] != "Removed")
