"""The tokenizer against transformers, and its byte table against whole decoding."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from penstock.contract.errors import ConfigError, RequestError
from penstock.gpu_node.engine.tokenizer import Tokenizer

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "🌊"}, {"role": "user", "content": "?"}]


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer(tiny_model)


def test_encodes_as_transformers_does(tokenizer: Tokenizer, tiny_model: Path) -> None:
    theirs: Any = AutoTokenizer.from_pretrained(tiny_model)
    for text in ("the gate", "水門 🌊", "<|im_start|>user", ""):
        assert tokenizer.encode(text) == theirs(text).input_ids
    want = theirs.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert tokenizer.encode_chat(CHAT) == want


def test_a_tokenizer_saved_with_limits_neither_cuts_nor_fills_up_prompts(tiny_model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "copy"))
    backend: Any = Backend.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    backend.save(str(folder / "tokenizer.json"))
    ours, theirs = Tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for text in ("a", "the gate opens by pressure " * 9):
        assert ours.encode(text) == theirs(text, truncation=False, padding=False).input_ids
    assert ours.encode_chat(CHAT) == Tokenizer(tiny_model).encode_chat(CHAT)


def test_developer_speaks_as_system(tokenizer: Tokenizer) -> None:
    by_role = [tokenizer.encode_chat([{"role": role, "content": "x"}]) for role in ("developer", "system", "user")]
    assert by_role[0] == by_role[1] != by_role[2]


@given(text=st.text())
def test_any_text_survives(tokenizer: Tokenizer, text: str) -> None:
    special = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
    if not any(name in text for name in special):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_any_tokens_decode_as_transformers_decodes_them(tokenizer: Tokenizer, tiny_model: Path) -> None:
    theirs: Any = AutoTokenizer.from_pretrained(tiny_model)
    rng = random.Random(0)
    for _ in range(200):
        token_ids = [rng.randrange(len(theirs)) for _ in range(rng.randrange(12))]
        assert tokenizer.decode(token_ids) == theirs.decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


@pytest.mark.model
def test_the_demo_models_tokens_decode_as_transformers_decodes_them(demo_model: Path) -> None:
    ours, theirs = Tokenizer(demo_model), AutoTokenizer.from_pretrained(demo_model)
    rng = random.Random(0)
    for _ in range(200):
        token_ids = [rng.randrange(len(theirs)) for _ in range(20)]
        assert ours.decode(token_ids) == theirs.decode(
            token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


def _write_sentencepiece_like(folder: Path) -> None:
    vocab = {"<unk>": 0, "\u2581the": 1, "\u2581gate": 2, "s": 3, **{f"<0x{i:02X}>": 4 + i for i in range(256)}}
    backend: Any = Backend(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>").save_pretrained(folder)


def test_byte_fallback_tokenizers_decode_as_transformers_decodes_them(tmp_path: Path) -> None:
    _write_sentencepiece_like(tmp_path)
    ours, theirs = Tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    token_ids = [1, 2, 3, *(4 + byte for byte in " 🌊".encode()), 2]
    assert ours.decode(token_ids) == theirs.decode(token_ids) == "the gates 🌊 gate"


def test_a_model_without_a_template_refuses_messages(tmp_path: Path) -> None:
    _write_sentencepiece_like(tmp_path)
    with pytest.raises(RequestError) as refusal:
        Tokenizer(tmp_path).encode_chat(CHAT)
    assert refusal.value.param == "messages"


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        Tokenizer(tmp_path)


def test_ids_past_the_tokenizer_stand_for_nothing(tiny_model: Path) -> None:
    padded = Tokenizer(tiny_model, vocab_size=1000)
    assert padded.decode([999, *padded.encode("the"), 500]) == "the"


def test_a_decoder_of_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    backend: Any = Backend(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    backend.decoder = decoders.WordPiece()
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="WordPiece"):
        Tokenizer(tmp_path)


@given(text=st.text(max_size=200))
def test_no_text_has_fewer_tokens_than_its_bytes_allow(tokenizer: Tokenizer, text: str) -> None:
    assert len(text.encode()) <= tokenizer.max_token_bytes * len(tokenizer.encode(text))


def test_a_normalizer_leaves_no_bound(tiny_model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "copy"))
    backend: Any = Backend.from_file(str(folder / "tokenizer.json"))
    backend.normalizer = normalizers.Strip()
    backend.save(str(folder / "tokenizer.json"))
    assert Tokenizer(folder).max_token_bytes == 0
