"""Tokenizers and chat templates that take any memory: refused when they are loaded, or bounded when a text is encoded.

Each case runs in a fork that may add a few hundred megabytes.
"""

from __future__ import annotations

import base64
import json
import resource
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fakes.limited_memory import said_within
from tokenizers import normalizers

from penstock import ConfigError
from penstock.contract.errors import RequestError
from penstock.gpu_node.engine.config import chat_template_of
from penstock.gpu_node.engine.text.chat import ChatTemplate
from penstock.gpu_node.engine.text.encoder import MAX_WHOLE_CHARS, Growth
from penstock.gpu_node.engine.text.template_worker import WORKER_MEMORY_MIB
from penstock.gpu_node.engine.text.tokenizer import Tokenizer
from penstock.gpu_node.engine.text.tokenizer_files import read_tokenizer_files

MIB = 500
SPACES: list[dict[str, Any]] = [
    {"type": "Prepend", "prepend": "\u2581"},
    {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
]


def _edit(folder: Path, **fields: Any) -> Path:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


def _edit_vocab(folder: Path, **ids: int) -> None:
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    _edit(folder, model=model | {"vocab": model["vocab"] | ids})


def _loaded(folder: Path) -> str:
    return str(len(Tokenizer(folder, vocab_size=384).token_bytes))


# --- ids and counts


@pytest.mark.parametrize("token_id", [(1 << 32) - 1, 1 << 20])
def test_a_token_of_an_absurd_id_is_refused_before_lists_are_made(folder: Path, token_id: int) -> None:
    _edit_vocab(folder, far=token_id)
    said = said_within(MIB, partial(_loaded, folder))
    assert said.startswith("ConfigError")
    assert f"'far' has the id {token_id}" in said
    assert "ids must be below 1,048,576" in said


def test_an_added_token_of_an_absurd_id_is_refused_before_lists_are_made(folder: Path) -> None:
    _edit_vocab(folder, **{"<far>": (1 << 32) - 1})
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    _edit(folder, added_tokens=[*added, added[0] | {"id": (1 << 32) - 1, "content": "<far>"}])
    said = said_within(MIB, partial(_loaded, folder))
    assert said.startswith("ConfigError")
    assert "an added token with the id 4294967295" in said


@pytest.mark.parametrize("listed", [{"4294967296": "<x>"}, {"-1": "<x>"}, {"one": "<x>"}, ["<x>"], {"5": {}}, {"5": 7}])
def test_an_added_token_of_the_config_is_checked(folder: Path, listed: Any) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"added_tokens_decoder": listed}))
    said = said_within(MIB, partial(_loaded, folder))
    assert said.startswith("ConfigError")
    assert "tokenizer_config.json" in said


@pytest.mark.parametrize("kind", ["BPE", "Unigram"])
def test_millions_of_tokens_are_refused_before_they_are_parsed(folder: Path, kind: str) -> None:
    """The library takes half a kilobyte for each."""
    vocab = ",".join(f'"{i:x}":{i}' if kind == "BPE" else f'["{i:x}",-1.0]' for i in range(2_200_000))
    is_bpe = kind == "BPE"
    _edit(folder, model={"type": kind, "vocab": "VOCAB", **({"merges": []} if is_bpe else {"unk_id": 0})})
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace('"VOCAB"', f"{{{vocab}}}" if is_bpe else f"[{vocab}]"))
    del vocab
    said = said_within(300, partial(_loaded, folder))
    assert said.startswith("ConfigError")
    assert "a vocabulary of 1,048,576 tokens has at most" in said


def test_a_large_vocabulary_is_still_read(folder: Path) -> None:
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    vocab = model["vocab"] | {f"Ġ{i:x}": i for i in range(len(model["vocab"]), 120_000)}
    _edit(folder, model=model | {"vocab": vocab})
    assert said_within(MIB, partial(_loaded, folder)) == "120000"


# --- growth


def _replace(pattern: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def _sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(steps)}


def _charsmap(text: str) -> str:
    """Return a map with an empty trie, and a text that could replace a character."""
    trie = bytes(1024)
    return base64.b64encode(len(trie).to_bytes(4, "little") + trie + text.encode() + b"\0").decode()


@pytest.mark.parametrize(
    "normalizer",
    [
        _sequence(*[_replace("a", "a" * 20)] * 5),
        _sequence(_sequence(_replace("a", "a" * 8)), _replace("b", "b" * 8)),
        _replace("ab", "c" * 66),
        _replace("x*", "c" * 32, "Regex"),
        {"type": "Prepend", "prepend": "\u2581" * 40},
        _sequence(_replace("a", "\ufdfa"), _replace("b", "bb")),
    ],
)
def test_a_normalizer_that_makes_a_text_far_longer_is_refused(folder: Path, normalizer: dict[str, Any]) -> None:
    said = said_within(MIB, partial(_loaded, _edit(folder, normalizer=normalizer)))
    assert said.startswith("ConfigError")
    assert "the normalizer of its tokenizer.json may make" in said
    assert "at most 32 are supported" in said


def test_a_decoder_that_makes_a_text_far_longer_is_refused(folder: Path) -> None:
    steps = [_replace("\u2581", " " * 40), {"type": "ByteFallback"}, {"type": "Fuse"}]
    said = said_within(MIB, partial(_loaded, _edit(folder, decoder={"type": "Sequence", "decoders": steps})))
    assert "the decoder of its tokenizer.json may make 40 characters of one" in said


def test_a_post_processor_of_many_tokens_is_refused(folder: Path) -> None:
    special = [{"SpecialToken": {"id": "<|im_end|>", "type_id": 0}}] * 2000
    tokens = {"<|im_end|>": {"id": "<|im_end|>", "ids": [2], "tokens": ["<|im_end|>"]}}
    single = [*special, {"Sequence": {"id": "A", "type_id": 0}}]
    frame = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": tokens}
    said = said_within(MIB, partial(_loaded, _edit(folder, post_processor=frame)))
    assert "the post_processor of its tokenizer.json puts 2,000 tokens around a text" in said


@pytest.mark.parametrize(
    ("steps", "growth"),
    [
        ([], (1, 0)),
        (SPACES, (1, 1)),
        ([_replace("abc", "d")], (1, 0)),
        ([_replace("ab", "cde")], (1.5, 0)),
        ([_replace(r"\s+", " ", "Regex")], (2, 1)),
        ([{"type": "Prepend", "prepend": "ab"}, _replace("a", "aaa"), {"type": "Lowercase"}], (3, 6)),
    ],
)
def test_growth_is_computed_from_lengths(steps: list[dict[str, Any]], growth: tuple[float, float]) -> None:
    found = Growth.of_steps(steps)
    assert (found.factor, found.added) == growth


@pytest.mark.parametrize("text", ["a", "aab", "b a", " ", "abab ab", "\u2581", "xxab"])
@pytest.mark.parametrize(
    "steps", [SPACES, [_replace("ab", "cde"), _replace("c", "aa")], [_replace("x*", "yy", "Regex")]]
)
def test_no_text_grows_more_than_computed(steps: list[dict[str, Any]], text: str) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers.models import BPE

    spec = json.loads(Backend(BPE()).to_str()) | {"normalizer": _sequence(*steps)}
    normalizer = Backend.from_str(json.dumps(spec)).normalizer
    assert isinstance(normalizer, normalizers.Normalizer)
    assert len(normalizer.normalize_str(text)) <= Growth.of_steps(steps).of(len(text), 1)


@pytest.mark.parametrize(
    ("normalizer", "text"),
    [
        (_sequence(*[_replace("a", "aa")] * 5), "a" * 40_000),
        (_replace("x*", "y" * 30, "Regex"), "b" * 40_000),
        ({"type": "Prepend", "prepend": "\u2581" * 30}, "a<|im_end|>" * 60_000),
        ({"type": "ByteLevel"}, "\u6c34" * 400_000),
    ],
)
def test_the_growth_of_a_text_counts(folder: Path, normalizer: dict[str, Any], text: str) -> None:
    """None of these has a million characters before it is normalized."""
    _edit(folder, normalizer=normalizer, pre_tokenizer=None)

    def encode() -> int:
        return len(Tokenizer(folder, vocab_size=384).encode(text))

    said = said_within(MIB, encode)
    assert said.startswith("RequestError")
    assert f"takes a text at once, of up to {MAX_WHOLE_CHARS} characters" in said


def test_a_text_of_a_plain_tokenizer_may_be_as_long_as_before(folder: Path) -> None:
    """Llama 2 puts a letter before a text, and replaces spaces by another letter."""
    backend = Tokenizer(_edit(folder, normalizer=_sequence(*SPACES), pre_tokenizer=None), vocab_size=384)
    assert backend._long_texts._checked_size("a b " * (MAX_WHOLE_CHARS // 4 - 1)) <= MAX_WHOLE_CHARS
    with pytest.raises(RequestError, match="takes a text at once"):
        backend._long_texts._checked_size("a b " * (MAX_WHOLE_CHARS // 4))


def test_a_charsmap_counts(folder: Path) -> None:
    backend = Tokenizer(_edit(folder, normalizer=_precompiled("y" * 32), pre_tokenizer=None), vocab_size=384)
    assert backend.encode("a text")
    with pytest.raises(RequestError, match="without lone surrogates"):
        backend.encode("\ud800")
    said = said_within(MIB, partial(_loaded, _edit(folder, normalizer=_precompiled("y" * 33))))
    assert "the normalizer of its tokenizer.json may make 33 characters of one" in said


def _precompiled(text: str) -> dict[str, Any]:
    return {"type": "Precompiled", "precompiled_charsmap": _charsmap(text)}


# --- chat templates


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 3000000000 }}",
        "{{ ('x' * 300000000) ~ ('y' * 600000000) }}",
        "{% set a = 'x' * 700000000 %}{{ a }}{{ 'y' * 700000000 }}",
    ],
)
def test_constants_of_a_chat_template_are_bounded_when_it_compiles(source: str) -> None:
    """The compiler folds them: the process took 3 to 7 GiB before its workers limited their memory."""

    def peak_mib_and_error() -> str:
        template = ChatTemplate(source, {})
        with pytest.raises((ConfigError, RequestError)) as raised:
            template.render([{"role": "user", "content": "x"}])
        template._started.close()
        return f"{resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10} {raised.value}"

    peak_mib, _, error = said_within(1 << 20, peak_mib_and_error, cpu_s=60).partition(" ")
    assert f"{WORKER_MEMORY_MIB} MiB of memory" in error
    assert int(peak_mib) < 1.5 * WORKER_MEMORY_MIB


def test_a_chat_template_of_megabytes_is_not_read(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("x" * (1 << 20) + "x")
    with pytest.raises(ConfigError, match=r"chat_template\.jinja has more than 1,048,576 bytes"):
        read_tokenizer_files(folder)
    (folder / "chat_template.jinja").unlink()
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": "x" * (1 << 20) + "x"}))
    with pytest.raises(ConfigError, match="a chat template has 1,048,577 characters"):
        read_tokenizer_files(folder)
    said = said_within(MIB, partial(chat_template_of, "/dev/zero"))
    assert "chat_template: /dev/zero has more than 1,048,576 characters" in said


# --- what is wrong is named


@pytest.mark.parametrize(
    ("fields", "tokenizer_class", "named"),
    [
        ({"added_tokens": float("nan")}, "PreTrainedTokenizerFast", "tokenizer.json: the field added_tokens cannot be"),
        ({"added_tokens": float("nan")}, "LlamaTokenizer", "the field added_tokens cannot be used"),
        (
            {"normalizer": {"type": "x"}},
            "PreTrainedTokenizerFast",
            "tokenizer.json: the field normalizer cannot be used",
        ),
        ({"model": 5}, "PreTrainedTokenizerFast", "tokenizer.json: the field model is '5' but must be an object"),
        (
            {"model": {"type": "BPE", "vocab": 3, "merges": []}},
            "PreTrainedTokenizerFast",
            "the field model (its vocab,",
        ),
    ],
)
def test_a_field_of_a_tokenizer_that_cannot_be_used_is_named(
    folder: Path, fields: dict[str, Any], tokenizer_class: str, named: str
) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": tokenizer_class}))
    with pytest.raises(ConfigError) as refused:
        Tokenizer(_edit(folder, **fields), vocab_size=384)
    assert named in refused.value.message


@pytest.mark.parametrize("extra", [5, [5], {"a": 5}], ids=str)
@pytest.mark.parametrize("tokenizer_class", ["PreTrainedTokenizerFast", "LlamaTokenizer"])
def test_a_list_of_tokens_that_is_none_is_named(folder: Path, tokenizer_class: str, extra: Any) -> None:
    config = {"tokenizer_class": tokenizer_class, "extra_special_tokens": extra}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"extra_special_tokens is .* but must be a list or an object of tokens"):
        Tokenizer(folder, vocab_size=384)
