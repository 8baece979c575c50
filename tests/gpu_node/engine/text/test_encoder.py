"""Chats encoded in pieces give the same tokens as whole texts."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from penstock.contract.errors import RequestError
from penstock.gpu_node.engine.text import encoder
from penstock.gpu_node.engine.text.encoder import (
    MIN_CACHED_CHARS,
    ChatEncoder,
    LongTextEncoder,
    separator_of,
    token_ids_of,
)
from penstock.gpu_node.engine.text.tokenizer import Tokenizer

SEPARATORS = ["<|im_start|>", "<|im_end|>", "<|im_end|>\n"]


class Counting:
    """A backend that counts the characters that it encodes."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.num_chars = 0

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        self.num_chars += sum(map(len, texts))
        return self._backend.encode_batch_fast(texts, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


def _chats(backend: Any) -> ChatEncoder:
    separator = separator_of(backend)
    return ChatEncoder(backend, separator, LongTextEncoder(backend, separator))


def _whole(backend: Backend, text: str) -> list[int]:
    """Encode a whole text. Offsets, which `encode` adds to the same tokens, take longer than the tokens."""
    ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return ids


@pytest.fixture
def backend(tiny_model: Path) -> Backend:
    return Backend.from_file(str(tiny_model / "tokenizer.json"))


@given(pieces=st.lists(st.one_of(st.sampled_from(SEPARATORS), st.text(max_size=30)), max_size=12))
def test_encoding_in_pieces_gives_the_tokens_of_the_whole_text(tiny_model: Path, pieces: list[str]) -> None:
    backend = Backend.from_file(str(tiny_model / "tokenizer.json"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoder, "MIN_CACHED_CHARS", 8)
        chats = _chats(backend)
        for _ in range(2):
            assert chats.encode("".join(pieces)) == _whole(backend, "".join(pieces))


def _normalizing(backend: Backend) -> Backend:
    """Normalize as Qwen and GPT-NeoX do; one added token is looked for in the normalized text."""
    backend.normalizer = normalizers.NFC()
    backend.add_tokens([AddedToken("<<>", normalized=True)])
    return backend


@given(
    pieces=st.lists(
        st.one_of(st.sampled_from([*SEPARATORS, "<<>", "\u0338", "\u0301", "e", "\u212b"]), st.text(max_size=30)),
        max_size=12,
    )
)
def test_encoding_in_pieces_gives_the_tokens_of_the_whole_text_with_a_normalizer(
    tiny_model: Path, pieces: list[str]
) -> None:
    backend = _normalizing(Backend.from_file(str(tiny_model / "tokenizer.json")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoder, "MIN_CACHED_CHARS", 8)
        chats = _chats(backend)
        for _ in range(2):
            assert chats.encode("".join(pieces)) == _whole(backend, "".join(pieces))


def _splitting(backend: Backend, pattern: str) -> Backend:
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return backend


def _gpt4_like(backend: Backend) -> Backend:
    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    pattern = words + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    return _splitting(backend, pattern)


@pytest.mark.parametrize("change", [lambda backend: backend, _normalizing, _gpt4_like])
@given(
    pieces=st.lists(
        st.one_of(
            st.sampled_from(
                [" a", " b\n", "\nc", "  ", "1234 5", "don't", "\u0301", "\u4f60 \u597d", "!\n", *SEPARATORS]
            ),
            st.text(max_size=12),
        ),
        max_size=40,
    )
)
def test_long_texts_encoded_in_parts_have_the_tokens_of_the_whole_text(
    tiny_model: Path, change: Callable[[Backend], Backend], pieces: list[str]
) -> None:
    backend, text = change(Backend.from_file(str(tiny_model / "tokenizer.json"))), "".join(pieces)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoder, "PART_CHARS", 8)
        texts = LongTextEncoder(backend, separator_of(backend))
        for framed in (False, True):
            assert texts.encode(text, framed=framed) == backend.encode(text, add_special_tokens=framed).ids


ODD = [
    "don't",
    "'s",
    "''",
    "!!",
    "a",
    "1",
    "12345",
    " ",
    "  ",
    "\n",
    "\n \n",
    "\u4f60",
    "\uff0c",
    "e\u0301",
    "\u0301",
    "\u1100\u1161",
]
"""Texts without a space before a word, and what a pattern groups by what follows or precedes it."""


def _o200k_like(backend: Backend) -> Backend:
    """Contractions belong to their words here, so splits of `'s's's` depend on where a run begins."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    ends = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    words = rf"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+{ends}|[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*{ends}"
    pattern = words + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    return _splitting(backend, pattern)


@pytest.mark.parametrize("change", [lambda backend: backend, _normalizing, _gpt4_like, _o200k_like])
@given(runs=st.lists(st.tuples(st.lists(st.sampled_from(ODD), min_size=1, max_size=3), st.integers(1, 90)), max_size=8))
def test_texts_with_few_spaces_encoded_in_parts_have_the_tokens_of_the_whole_text(
    tiny_model: Path, change: Callable[[Backend], Backend], runs: list[tuple[list[str], int]]
) -> None:
    backend = change(Backend.from_file(str(tiny_model / "tokenizer.json")))
    text = "".join("".join(run) * times for run, times in runs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoder, "PART_CHARS", 100)
        texts = LongTextEncoder(backend, separator_of(backend))
        assert texts.encode(text, framed=False) == _whole(backend, text)


class Sized(Counting):
    """A backend that notes the most characters that it got at once."""

    most = 0

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        self.most = max(self.most, *map(len, texts))
        return super().encode_batch_fast(texts, **options)


@pytest.mark.parametrize("text", ["don't!", "1,", "\u4f60\u597d\uff0c", "a'", "\U0001f600a"])
def test_texts_without_spaces_are_encoded_in_parts(backend: Backend, text: str) -> None:
    sized: Any = Sized(backend)
    long = text * (10 * encoder.PART_CHARS // len(text))
    assert LongTextEncoder(sized, separator_of(backend)).encode(long, framed=False) == _whole(backend, long)
    assert sized.most <= 2 * encoder.PART_CHARS


def test_a_word_of_up_to_its_limit_is_encoded_and_a_longer_one_is_refused(backend: Backend) -> None:
    texts = LongTextEncoder(backend, separator_of(backend))
    before, after = "one " * encoder.PART_CHARS, "! two" * encoder.PART_CHARS
    for letter in "a1\u4f60":
        text = before + letter * (encoder.MAX_WORD_CHARS - 2 * encoder.PART_CHARS) + after
        assert texts.encode(text, framed=False) == _whole(backend, text)
        with pytest.raises(RequestError, match="262144 characters in which no word ends"):
            texts.encode(before + letter * (encoder.MAX_WORD_CHARS + encoder.PART_CHARS) + after, framed=False)
    for space in (" ", "\n", "\t "):
        with pytest.raises(RequestError, match="separate words by spaces or lines"):
            texts.encode(before + space * (8 << 20), framed=False)


def test_a_tokenizer_that_permits_no_cuts_bounds_a_text_as_it_normalizes_it(backend: Backend) -> None:
    backend.normalizer = normalizers.NFKC()
    sized: Any = Sized(backend)
    texts = LongTextEncoder(sized, separator_of(backend))
    text = "a word " * 100_000
    assert texts.encode(text, framed=False) == _whole(backend, text)
    sized.most = 0
    for refused in ("a" * (encoder.MAX_WHOLE_CHARS + 1), "\ufdfa" * 100_000, "a word \ufdfa" * 60_000):
        with pytest.raises(RequestError, match="takes a text at once, of up to 1048576 characters"):
            texts.encode(refused, framed=False)
    assert sized.most == 0


def test_a_tokenizer_that_permits_no_cuts_gets_one_long_text_at_a_time(backend: Backend) -> None:
    backend.normalizer = normalizers.NFKC()

    class Slow(Counting):
        num_now = most = 0

        def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
            self.num_now += 1
            self.most = max(self.most, self.num_now)
            time.sleep(0.02)
            self.num_now -= 1
            return super().encode_batch_fast(texts, **options)

    for num_chars, together in ((encoder.MAX_SMALL_WHOLE_CHARS, True), (encoder.MAX_SMALL_WHOLE_CHARS + 2, False)):
        slow: Any = Slow(backend)
        texts = LongTextEncoder(slow, separator_of(backend))
        text = ("a " * num_chars)[:num_chars]
        threads = [threading.Thread(target=texts.encode, args=(text,), kwargs={"framed": False}) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (slow.most > 1) is together


def test_library_never_gets_a_long_text_whole(backend: Backend) -> None:
    sized: Any = Sized(backend)
    text = "word after word\n" * 50_000
    assert LongTextEncoder(sized, separator_of(backend)).encode(text, framed=False) == _whole(backend, text)
    assert sized.most <= 2 * encoder.PART_CHARS


@pytest.mark.parametrize("change", [lambda backend: backend, _normalizing])
def test_a_long_system_prompt_is_encoded_once(backend: Backend, change: Callable[[Backend], Backend]) -> None:
    counting = Counting(change(backend))
    chats = _chats(counting)
    system = "<|im_start|>system\n" + "You know all about rivers. " * 100 + "<|im_end|>\n"
    for i in range(20):
        text = f"{system}<|im_start|>user\nquestion {i}<|im_end|>\n<|im_start|>assistant\n"
        assert chats.encode(text) == _whole(backend, text)
    assert len(system) < counting.num_chars < len(system) + 20 * 100


def test_a_piece_is_encoded_again_for_each_tenant_and_salt(backend: Backend) -> None:
    counting = Counting(backend)
    chats, text = _chats(counting), "<|im_start|>" + "a secret that two know. " * 100 + "<|im_end|>"
    for owner in (("a", None), ("b", None), ("a", "s"), ("b", "s"), ("as", None)):
        before = counting.num_chars
        assert chats.encode(text, owner) == _whole(backend, text)
        assert counting.num_chars - before == len(text)
        assert chats.encode(text, owner) == _whole(backend, text)
        assert counting.num_chars - before < len(text) + MIN_CACHED_CHARS


def test_a_plain_prompt_is_encoded_again_for_each_tenant_and_salt(tiny_model: Path, backend: Backend) -> None:
    counting, text = Counting(backend), "a secret that two know. " * 100
    tokenizer = Tokenizer(tiny_model)
    tokenizer._long_texts = LongTextEncoder(counting, separator_of(backend))
    want = token_ids_of(backend, text, framed=True)
    for owner in (("a", None), ("b", None), ("a", "s"), ("as", None)):
        before = counting.num_chars
        assert tokenizer.encode_prompt(text, owner) == want
        assert counting.num_chars - before >= len(text)
        before = counting.num_chars
        first = tokenizer.encode_prompt(text, owner)
        first.append(0)
        assert tokenizer.encode_prompt(text, owner) == want
        assert counting.num_chars == before


def test_least_recently_used_piece_is_evicted(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = [f"<|im_start|>{chr(97 + i) * MIN_CACHED_CHARS}<|im_end|>" for i in range(3)]
    sizes = [len(_whole(backend, piece)) for piece in pieces]
    monkeypatch.setattr(encoder, "MAX_CACHED_TOKENS", sizes[0] + max(sizes[1:]))
    counting = Counting(backend)
    chats = _chats(counting)
    for i in (0, 1, 0, 2):
        chats.encode(pieces[i])
    known = counting.num_chars
    chats.encode(pieces[0])
    assert counting.num_chars - known < MIN_CACHED_CHARS
    chats.encode(pieces[1])
    assert counting.num_chars - known > MIN_CACHED_CHARS


def _looks_for_added_tokens_in_normalized_text(backend: Backend) -> Backend:
    spec = json.loads(backend.to_str()) | {"normalizer": {"type": "NFC"}}
    for token in spec["added_tokens"]:
        token["normalized"] = True
    return Backend.from_str(json.dumps(spec))


def _begins_pieces_with_a_space(backend: Backend) -> Backend:
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return backend


def _has_a_token_that_takes_spaces(backend: Backend) -> Backend:
    backend.add_special_tokens([AddedToken("<|wide|>", rstrip=True)])
    return backend


@pytest.mark.parametrize(
    "change", [_looks_for_added_tokens_in_normalized_text, _begins_pieces_with_a_space, _has_a_token_that_takes_spaces]
)
def test_tokenizer_whose_pieces_depend_on_each_other_encodes_whole_texts(backend: Backend, change: Any) -> None:
    backend = change(backend)
    text = "<|im_start|>" + "a e\u0301 " * MIN_CACHED_CHARS + "<|im_end|> <|wide|> b<|im_end|> c"
    counting = Counting(backend)
    chats = _chats(counting)
    for _ in range(2):
        assert chats.encode(text) == _whole(backend, text)
    assert counting.num_chars == 2 * len(text)


@contextmanager
def _turns_of_another_thread() -> Iterator[list[int]]:
    """Count how often a thread runs, which it can only if the other thread releases the interpreter by itself."""
    turns, is_done, interval_s = [0], threading.Event(), sys.getswitchinterval()

    def count() -> None:
        while not is_done.is_set():
            turns[0] += 1
            time.sleep(0)

    thread = threading.Thread(target=count)
    sys.setswitchinterval(1000)
    try:
        thread.start()
        yield turns
    finally:
        sys.setswitchinterval(interval_s)
        is_done.set()
        thread.join()


def test_long_prompt_does_not_block_other_threads(tiny_model: Path) -> None:
    tokenizer, text = Tokenizer(tiny_model), " ." * 100_000
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_chat([{"role": "user", "content": text}])):
        with _turns_of_another_thread() as turns:
            before = turns[0]
            encode(text)
            assert turns[0] > before


def test_lone_surrogate_is_a_request_error(tiny_model: Path) -> None:
    tokenizer = Tokenizer(tiny_model)
    for refusing in (tokenizer.encode, lambda text: tokenizer.encode_chat([{"role": "user", "content": text}])):
        with pytest.raises(RequestError, match="lone surrogates"):
            refusing("a\ud83d")
