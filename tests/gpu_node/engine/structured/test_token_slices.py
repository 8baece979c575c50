"""Tokens that a mask allows at once are those that it would allow one by one."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from penstock.gpu_node.engine.structured.template import SLICES
from penstock.gpu_node.engine.structured.worker import Compiler

BYTES = [bytes([byte]) for byte in range(256)]
WORDS = [
    bytes(random.Random(size * 7 + i).choices(b" abcdefgh", k=size)) + end
    for size in range(2, 40)
    for i, end in enumerate((b"", b"", b"", b'"', b'", "', b"\n", b"\\", "ł".encode()))
]


class _Tokenizer:
    """Single bytes and words of many lengths, some with the mark that ends a text."""

    eos_token_id = 256
    bos_token_id = None
    tokens = (*BYTES, b"<|end|>", *dict.fromkeys(WORDS))
    special_token_ids = (256,)

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


def _matcher(slices: list[str], schema: dict[str, object]) -> LLMatcher:
    tokenizer = LLTokenizer(TokenizerWrapper(_Tokenizer()), slices=slices)
    return Compiler(tokenizer).matcher("json", json.dumps(schema))


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"maxLength": 20},
        {"minLength": 5, "maxLength": 44},
        {"maxLength": 9},
        {"pattern": "^[a-d][a-h ]{3,25}$"},
        {"pattern": "^[a-z ]{0,30}$"},
        {"pattern": r"^\w[A-Za-z ]*\."},
    ],
    ids=str,
)
def test_token_slices_change_no_mask(limits: dict[str, object]) -> None:
    text = {"type": "string", **limits}
    schema = {"type": "array", "items": {"anyOf": [text, {"type": "integer"}]}}
    sliced, plain = _matcher([*SLICES], schema), _matcher([], schema)
    for luck in range(6):
        rng = random.Random(luck)
        for matcher in (sliced, plain):
            assert matcher.reset()
        for _ in range(40):
            mask = plain.compute_bitmask()
            assert sliced.compute_bitmask() == mask
            allowed = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little").nonzero()[0].tolist()
            chosen = rng.choice(allowed)
            if chosen == _Tokenizer.eos_token_id:
                break
            assert sliced.consume_token(chosen) and plain.consume_token(chosen)
