"""The most bytes of a text that one token stands for, by the steps of a tokenizer."""

from __future__ import annotations

import shutil
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes.sentencepiece import write_sentencepiece_tokenizer
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import normalizers, pre_tokenizers

from penstock.gpu_node.engine.text.longest_token import NORMAL_FORM_SHRINKS
from penstock.gpu_node.engine.text.tokenizer import Tokenizer

LLAMA = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]


def changed(folder: Path, change: Callable[[Any], None]) -> Tokenizer:
    """Return the tokenizer of a folder after a change of its steps."""
    backend: Any = Backend.from_file(str(folder / "tokenizer.json"))
    change(backend)
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def of_llama(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("llama")
    write_sentencepiece_tokenizer(folder)
    return changed(folder, lambda backend: setattr(backend, "normalizer", normalizers.Sequence(LLAMA)))


@pytest.fixture(scope="module")
def of_qwen(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = Path(shutil.copytree(tiny_model, tmp_path_factory.mktemp("qwen") / "copy"))
    return changed(folder, lambda backend: setattr(backend, "normalizer", normalizers.NFC()))


@given(text=st.text(max_size=60))
@example(text="\u2581the\u2581gate")
@example(text=20 * "\u212a" + 20 * "\u1fbe\u0308\u0301")
def test_no_text_has_fewer_tokens_than_its_bytes_allow(of_llama: Tokenizer, of_qwen: Tokenizer, text: str) -> None:
    for tokenizer in (of_llama, of_qwen):
        assert tokenizer.max_token_bytes
        assert len(text.encode()) <= tokenizer.max_token_bytes * len(tokenizer.encode(text))


def test_a_bound_is_not_far_above_the_longest_token(tiny_model: Path, of_llama: Tokenizer, of_qwen: Tokenizer) -> None:
    assert of_llama.max_token_bytes == len("\u2581gate".encode())
    assert of_qwen.max_token_bytes == NORMAL_FORM_SHRINKS * Tokenizer(tiny_model).max_token_bytes


def _lose_spaces(backend: Any) -> None:
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), backend.pre_tokenizer])


@pytest.mark.parametrize(
    "change",
    [
        lambda backend: setattr(backend, "normalizer", normalizers.Strip()),
        lambda backend: setattr(backend, "normalizer", normalizers.Sequence([normalizers.NFC(), normalizers.NFKC()])),
        lambda backend: setattr(backend, "normalizer", normalizers.Replace("two", "2")),
        _lose_spaces,
    ],
)
def test_steps_that_may_drop_any_text_leave_no_bound(
    tiny_model: Path, tmp_path: Path, change: Callable[[Any], None]
) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "copy"))
    assert changed(folder, change).max_token_bytes == 0


def test_no_normal_form_shrinks_a_text_more() -> None:
    """A form is made of characters whose decompositions have characters that others become, too."""
    composed = [one for one in map(chr, range(sys.maxunicode + 1)) if unicodedata.decomposition(one)[:1] not in "<"]
    longest = dict[str, int]()
    for one in composed:
        if len(parts := unicodedata.normalize("NFD", one)) == 1:
            longest[parts] = max(longest.get(parts, 0), len(one.encode()))
    for form in ("NFC", "NFD"):
        for one in composed:
            parts, normal = unicodedata.normalize("NFD", one), unicodedata.normalize(form, one)
            before = sum(max(longest.get(part, 0), len(part.encode())) for part in parts)
            assert before <= NORMAL_FORM_SHRINKS * len(normal.encode()), hex(ord(one))
