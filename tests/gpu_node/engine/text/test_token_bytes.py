"""The bytes of a vocabulary's tokens, against the tokenizers library's own alphabet."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from penstock.gpu_node.engine.text.token_bytes import byte_fallback, byte_level, tokens_by_id

ALPHABET = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def spelled(content: str) -> str:
    return "".join(part for part, _ in ALPHABET.pre_tokenize_str(content))


@given(contents=st.lists(st.text(max_size=8), max_size=20))
def test_tokens_in_the_byte_alphabet_are_the_bytes_that_they_spell(contents: list[str]) -> None:
    assert byte_level([spelled(content) for content in contents]) == [content.encode() for content in contents]


@pytest.mark.parametrize("foreign", ["a b", "日本", "\x00", "\u0144", "🌊", "\x80é"])
def test_tokens_outside_the_byte_alphabet_are_utf_8(foreign: str) -> None:
    tokens, want = [foreign, "", spelled("é ü"), foreign], [foreign, "", "é ü", foreign]
    assert byte_level(tokens) == [text.encode() for text in want]


def test_bytes_and_spaces_of_sentencepiece_tokens() -> None:
    assert byte_fallback(["<0x0A>", "\u2581the", "<0xé>", ""]) == [b"\n", b" the", "<0xé>".encode(), b""]


@pytest.mark.parametrize("vocab", [{"a": 0, "b": 1}, {"a": 0, "c": 3}, {"a": 0, "b": 2, "<x>": 1}, {}])
def test_tokens_by_id_leave_out_added_ones(vocab: dict[str, int]) -> None:
    backend: Any = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.add_tokens(["added", "c"])
    want = [""] * (max(vocab.values(), default=-1) + 1)
    for token, token_id in vocab.items():
        want[token_id] = token
    assert tokens_by_id(backend) == want
