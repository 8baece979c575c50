"""A GGUF file is described without transformers, with llama.cpp's tokens, and as transformers describes it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from tokenizers import pre_tokenizers

from penstock.contract.errors import ConfigError
from penstock.gpu_node.engine.text.tokenizer import Tokenizer
from penstock.gpu_node.model.checkpoint import gguf_conversion as gguf
from penstock.gpu_node.model.checkpoint.gguf_description import describe
from penstock.gpu_node.model.checkpoint.gguf_file import GgufFile, GgufHeader, read_header
from penstock.gpu_node.model.checkpoint.gguf_tokenizer import TOKENIZER_LISTS, end_ids, named_templates
from penstock.gpu_node.model.checkpoint.gguf_vocabulary import tokenizer_of
from penstock.gpu_node.model.checkpoint.source import open_model

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|日本|>", "<a b>"]
MERGES = ["Ġ t", "h e", "Ġt he", "i n", "Ġ w", "Ã ©", "1 2"]
WORDS = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
AT_THE_END = len(WORDS)
"""Index of the first special token in a file as Llama 3's."""

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "without ids and template": {"ids": {}, "template": None},
    "named, with unknown token": {"name": "A model", "ids": {"bos": 1, "eos": 2, "unk": 0, "pad": 2}},
    "framed": {"add_bos": True, "add_eos": True, "output": True},
    "not framed": {"add_bos": False, "add_eos": False, "pre": "default"},
    "frame without tokens": {"add_bos": True, "add_eos": True, "ids": {}},
    "Llama 3": {
        "tokens": [*WORDS, *SPECIAL[1:]],
        "kinds": [NORMAL] * len(WORDS) + [CONTROL] * 4,
        "pre": "llama-bpe",
        "ids": {"bos": AT_THE_END, "eos": AT_THE_END + 1, "pad": AT_THE_END + 3},
        "add_bos": True,
        "vocab_size": False,
    },
    "user-defined": {"kinds": [CONTROL] * 3 + [USER_DEFINED] * 3 + [NORMAL] * (len(WORDS) - 1)},
    "odd words": {
        "tokens": [*SPECIAL, *WORDS, "日本", "a b", "[PAD1]", "the", "the"],
        "kinds": [CONTROL] * 5 + [NORMAL] * len(WORDS) + [NORMAL, USER_DEFINED, UNUSED, NORMAL, NORMAL],
    },
}


def write(
    path: Path,
    *,
    architecture: str = "llama",
    tokens: list[str] | None = None,
    kinds: list[int] | None = None,
    pre: str | None = "smollm",
    ids: Mapping[str, int] | None = None,
    add_bos: bool | None = None,
    add_eos: bool | None = None,
    template: str | None = "{{ messages }} é",
    name: str | None = None,
    output: bool = False,
    heads: int = 4,
    vocab_size: bool = True,
    merges: list[str] | None = None,
) -> Path:
    writer: Any = GGUFWriter(path, architecture)
    tokens = tokens or [*SPECIAL, *WORDS]
    sizes = {"block_count": 1, "context_length": 64, "embedding_length": 32, "feed_forward_length": 48}
    for key, value in sizes.items():
        getattr(writer, f"add_{key}")(value)
    writer.add_head_count(heads)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5e5)
    writer.add_rope_dimension_count(8)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds or [CONTROL] * len(SPECIAL) + [NORMAL] * len(WORDS))
    writer.add_token_merges(merges or MERGES)
    for key, token_id in ({"bos": 1, "eos": 2, "pad": 2} if ids is None else ids).items():
        getattr(writer, f"add_{key}_token_id")(token_id)
    optional: list[tuple[Callable[[Any], None], Any]] = [
        (writer.add_tokenizer_pre, pre),
        (writer.add_add_bos_token, add_bos),
        (writer.add_add_eos_token, add_eos),
        (writer.add_chat_template, template),
        (writer.add_name, name),
        (writer.add_vocab_size, len(tokens) if vocab_size else None),
    ]
    for add, value in optional:
        if value is not None:
            add(value)
    for tensor in ("token_embd.weight", *(["output.weight"] if output else [])):
        writer.add_tensor(tensor, np.zeros((len(tokens), 32), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def header_of(path: Path) -> GgufHeader:
    return read_header(memoryview(path.read_bytes()), TOKENIZER_LISTS)


@pytest.mark.slow
@pytest.mark.parametrize("real", ["demo_gguf", "gemma_gguf"])
def test_a_real_file_is_described_as_by_transformers(real: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    path: Path = request.getfixturevalue(real)
    # It looks for the file beside the files of a model.
    (tmp_path / "m.gguf").symlink_to(path)
    theirs: Any = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    ours = describe(GgufFile(path).header_with(TOKENIZER_LISTS), tmp_path / "ours").backend
    assert [ours.encode(text).ids for text in TEXTS] == [theirs(text).input_ids for text in TEXTS]
    config = AutoConfig.from_pretrained(tmp_path, gguf_file="m.gguf").to_dict()
    written = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert {name: written[name] for name in SIZES} == {name: config[name] for name in SIZES}


SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"),
    *("num_key_value_heads", "max_position_embeddings", "bos_token_id"),
)
# Other signs of numbers than digits are words of their own in llama.cpp's tokenizer of the demo model.
TEXTS = (
    *("", " ", "hi", " hi", "two  spaces   and four    .", "line\n\n\n\nend\n", "\ttab\r\n", "3 33 333 3333 33333"),
    *("l'été où ça naît", "нещо на Български", "日本語 ភាសា", "🚀 (normal) 😶‍🌫️ (multiple)", "I'Ve been 'told he's"),
)


def test_tokenizer_of_the_description_works(tmp_path: Path) -> None:
    gguf.describe_gguf(GgufFile(write(tmp_path / "m.gguf", add_bos=True)), tmp_path / "m", lambda stage, fraction: None)
    tokenizer = Tokenizer(tmp_path / "m")
    token_ids = tokenizer.encode("the win é 12<|im_end|>")
    assert tokenizer.names_of(token_ids)[:2] == ["<|im_start|>", "t"]
    assert tokenizer.decode(token_ids) == "the win é 12"
    assert tokenizer.eos_token_ids == {2}


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_tokenizer_in_memory_is_the_written_one(variant: str, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    file = GgufFile(write(tmp_path / "m.gguf", **VARIANTS[variant]))
    written = gguf.describe_gguf(file, folder, lambda stage, fraction: None)
    ours, read = Tokenizer(folder, vocab_size=400, written=written), Tokenizer(folder, vocab_size=400)
    assert ours.token_bytes == read.token_bytes
    assert ours.to_json() == read.to_json()
    for text in ("the win é 12<|im_end|>", "日本 a b<|日本|>[PAD1]"):
        assert ours.encode(text) == read.encode(text)


def test_the_tokenizer_of_a_gguf_file_is_in_memory_only_if_it_was_written_now(tmp_path: Path) -> None:
    path = str(write(tmp_path / "m.gguf"))
    first, second = (open_model(path, lambda stage, fraction: None) for _ in range(2))
    assert first.source == second.source
    assert first.tokenizer is not None
    assert second.tokenizer is None


def _described(tmp_path: Path, **facts: Any) -> Tokenizer:
    gguf.describe_gguf(GgufFile(write(tmp_path / "m.gguf", **facts)), tmp_path / "m", lambda stage, fraction: None)
    return Tokenizer(tmp_path / "m")


@pytest.mark.parametrize(
    ("pre", "text", "tokens"),
    [
        ("smollm", "12\n\n12", ["1", "2", "ĊĊ", "1", "2"]),
        ("smollm", "\n\n1", ["ĊĊ", "1"]),
        ("gpt-2", "\n\n1", ["Ċ", "Ċ", "1"]),
        ("qwen2", "12", ["1", "2"]),
        ("llama-bpe", "12", ["<|im_start|>", "12"]),
        ("llama-bpe", " win", ["<|im_start|>", "Ġwin"]),
        ("dbrx", " win", ["Ġw", "in"]),
        ("tekken", "12 win", ["<|im_start|>", "1", "2", "Ġwin"]),
        ("gpt-4o", "12 win", ["12", "Ġw", "in"]),
        ("default", "1212", ["12", "1", "2"]),
        (None, "1212", ["12", "1", "2"]),
        ("gpt-2", "1212", ["12", "12"]),
        ("deepseek-coder", "12 win", ["1", "2", "Ġw", "in"]),
    ],
)
def test_words_are_split_as_by_llama_cpp(pre: str | None, text: str, tokens: list[str], tmp_path: Path) -> None:
    # No merge makes " win": it is one token only where the vocabulary counts before the merges.
    words, merges = [*WORDS, "Ġwin", "ĊĊ"], [*MERGES, "Ċ Ċ"]
    facts: dict[str, Any] = {"tokens": [*SPECIAL, *words], "kinds": [CONTROL] * len(SPECIAL) + [NORMAL] * len(words)}
    tokenizer = _described(tmp_path, pre=pre, merges=merges, **facts)
    assert tokenizer.names_of(tokenizer.encode(text)) == tokens


@pytest.mark.parametrize(
    ("pre", "add_bos", "add_eos", "frame"),
    [
        ("llama-bpe", None, None, (1, 0)),
        ("llama-bpe", False, None, (0, 0)),
        ("tekken", None, True, (1, 1)),
        ("qwen2", None, None, (0, 0)),
        ("qwen2", True, None, (1, 0)),
    ],
)
def test_a_text_begins_with_bos_as_in_llama_cpp(
    pre: str, add_bos: bool | None, add_eos: bool | None, frame: tuple[int, int], tmp_path: Path
) -> None:
    tokenizer = _described(tmp_path, pre=pre, add_bos=add_bos, add_eos=add_eos)
    plain = tokenizer.encode("the", framed=False)
    assert tokenizer.encode("the") == [1] * frame[0] + plain + [2] * frame[1]


@pytest.mark.parametrize(
    ("template", "add_bos", "rendered"),
    [
        ("{{ messages[0].content }}", True, "<|im_start|>the"),
        ("{{ bos_token }}{{ messages[0].content }}", True, "<|im_start|>the"),
        ("<|im_start|>{{ messages[0].content }}", True, "<|im_start|>the"),
        ("{{ messages[0].content }}", False, "the"),
    ],
)
def test_a_chat_begins_with_bos_once(template: str, add_bos: bool, rendered: str, tmp_path: Path) -> None:
    tokenizer = _described(tmp_path, template=template, add_bos=add_bos)
    assert tokenizer.text_of(tokenizer.encode_chat([{"role": "user", "content": "the"}])) == rendered


def test_merges_of_tokens_that_are_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"m\.gguf.*tokenizer\.ggml\.merges does not fit tokenizer\.ggml\.tokens"):
        _described(tmp_path, merges=[*MERGES, "q q"])


def test_an_unknown_way_to_split_words_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"m\.gguf: tokenizer\.ggml\.pre is 'kimi-k2'.*known: .*llama-bpe"):
        _described(tmp_path, pre="kimi-k2")


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_special_tokens_are_found_in_a_text_whatever_their_letters(architecture: str, tmp_path: Path) -> None:
    """As DeepSeek's are spelled."""
    marks = ["<｜User｜>", "<｜end▁of▁sentence｜>"]
    kinds = [CONTROL] * 3 + [USER_DEFINED, CONTROL] + [NORMAL] * len(WORDS)
    facts: dict[str, Any] = {"architecture": architecture, "tokens": [*SPECIAL[:3], *marks, *WORDS], "kinds": kinds}
    tokenizer = _described(tmp_path, pre="qwen2", template=None, **facts)
    assert tokenizer.encode("<｜User｜>12<｜end▁of▁sentence｜>") == [3, *tokenizer.encode("12"), 4]
    assert tokenizer.decode([3, 4, 3]) == "<｜User｜>" * 2


@pytest.mark.parametrize("kind", [NORMAL, USER_DEFINED])
def test_a_token_that_ends_an_answer_is_special_whatever_the_file_says(kind: int, tmp_path: Path) -> None:
    kinds = [CONTROL, CONTROL, kind, CONTROL, CONTROL, *[NORMAL] * len(WORDS)]
    tokenizer = _described(tmp_path, kinds=kinds)
    assert tokenizer.encode("<|im_end|>") == [2] and tokenizer.decode([2]) == ""


def test_a_token_that_the_file_lacks_is_not_added(tmp_path: Path) -> None:
    tokenizer = _described(tmp_path, tokens=[*WORDS, *SPECIAL[1:]], kinds=[NORMAL] * len(WORDS) + [CONTROL] * 4, ids={})
    assert tokenizer.id_of("<|endoftext|>") is None


@pytest.mark.parametrize(
    ("tokens", "ids", "ends"),
    [
        ({}, {"eos": 2}, {0, 2}),  # <|endoftext|> and <|im_end|>
        ({}, {}, {0, 2}),
        ({}, {"eos": 3, "eot": 4}, {0, 2, 3, 4}),
        ({4: "<|eot_id|>"}, {"eos": 3, "eom": 1}, {0, 1, 2, 3, 4}),
        ({0: "<a>", 2: "<b>", 4: "<end_of_turn>"}, {"eos": 3}, {3, 4}),
        ({0: "<a>", 2: "<b>", 3: "<|end|>", 4: "</s>"}, {"eos": 100}, {3, 4}),
        ({0: "<|return|>", 2: "<|call|>", 3: "<|end|>"}, {"eos": 0}, {0, 2}),
    ],
)
def test_all_tokens_that_end_an_answer_in_llama_cpp_end_it(
    tokens: dict[int, str], ids: dict[str, int], ends: set[int]
) -> None:
    texts = [tokens.get(i, text) for i, text in enumerate(SPECIAL)] + WORDS
    named = {f"tokenizer.ggml.{name}_token_id": token_id for name, token_id in ids.items()}
    found = end_ids({"tokenizer.ggml.model": "gpt2", TOKENIZER_LISTS[0]: texts[: len(SPECIAL)], **named})
    assert set(found) == ends


# --- SentencePiece

PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "h", "i", "▁h", "hi", "▁hi", "<|user|>"]
KINDS = [2, CONTROL, CONTROL, *[6] * 256, *[NORMAL] * 6, CONTROL]


def tokenizer_with(model: str, tokens: list[str], kinds: list[int], **facts: Any) -> Any:
    """Return the tokenizer of some metadata. facts: without `tokenizer.ggml.`, or with the name of their group."""
    metadata: dict[str, Any] = {"general.architecture": "llama", "tokenizer.ggml.model": model}
    metadata |= {TOKENIZER_LISTS[0]: tokens, TOKENIZER_LISTS[1]: kinds}
    for name, fact in facts.items():
        metadata[f"general.{name}" if name in ("architecture", "name") else f"tokenizer.ggml.{name}"] = fact
    return tokenizer_of(metadata).backend


def pieces(**facts: Any) -> Any:
    """Return the tokenizer of a SentencePiece model with some metadata."""
    scores = [0.0] * 259 + [-9.0, -9.0, -9.0, -1.0, -3.0, -2.0, 0.0]
    return tokenizer_with("llama", PIECES, KINDS, **{"scores": scores} | facts)


@pytest.mark.parametrize(
    ("facts", "text", "tokens"),
    [
        ({}, "hi", ["<s>", "▁hi"]),
        ({}, " hi", ["<s>", "▁", "▁hi"]),
        ({}, "<|user|>hi</s>hi", ["<s>", "<|user|>", "▁hi", "</s>", "▁hi"]),
        ({"add_bos_token": False}, "hi", ["▁hi"]),
        ({"add_eos_token": True}, "hi", ["<s>", "▁hi", "</s>"]),
        ({"bos_token_id": 2}, "hi", ["</s>", "▁hi"]),
        ({"add_space_prefix": False}, "hi<|user|>hi hi", ["<s>", "hi", "<|user|>", "hi", "▁hi"]),
        ({"architecture": "phi3", "name": "Phi-3 mini"}, "<|user|>\nhi", ["<s>", "<|user|>", "▁hi"]),
        ({"architecture": "phi3", "name": "Another"}, "<|user|>\nhi", ["<s>", "<|user|>", "▁", "<0x0A>", "hi"]),
    ],
)
def test_pieces_are_those_of_llama_cpp(facts: dict[str, Any], text: str, tokens: list[str]) -> None:
    assert [PIECES[token_id] for token_id in pieces(**facts).encode(text).ids] == tokens


@pytest.mark.parametrize(("prefix", "decoded"), [(True, "hi hi"), (False, " hi hi")])
def test_only_a_space_that_was_put_before_a_text_is_dropped(prefix: bool, decoded: str) -> None:
    tokenizer = pieces(add_space_prefix=prefix)
    assert tokenizer.decode([tokenizer.token_to_id("▁hi")] * 2) == decoded


def test_pieces_with_better_scores_are_made_first() -> None:
    tokens, kinds = ["<unk>", "a", "b", "c", "ab", "bc"], [2, *[NORMAL] * 5]
    facts: dict[str, Any] = {"add_bos_token": False, "add_space_prefix": False}
    for scores, made in (([0.0] * 4 + [-1.0, -2.0], ["ab", "c"]), ([0.0] * 4 + [-2.0, -1.0], ["a", "bc"])):
        tokenizer = tokenizer_with("llama", tokens, kinds, scores=scores, **facts)
        assert tokenizer.encode("abc").tokens == made


def test_gemma_4_merges_the_characters_of_each_line() -> None:
    tokens = ["<unk>", "<bos>", *(f"<0x{i:02X}>" for i in range(256)), "\n", "\n\n", "▁", "a", "a▁", "a▁a"]
    kinds, merges = [2, CONTROL, *[6] * 256, *[NORMAL] * 6], ["a ▁", "a▁ a", "\n \n"]
    tokenizer = tokenizer_with("gemma4", tokens, kinds, merges=merges, bos_token_id=1, add_bos_token=False)
    assert tokenizer.encode("a a\n\na é").tokens == ["<bos>", "a▁a", "\n\n", "a▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("a a\n\na é").ids) == "a a\n\na é"


def test_words_are_cut_into_the_longest_pieces_as_by_bert() -> None:
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "▁un", "▁want", "able", "ab", "▁,"]
    facts = {"cls_token_id": 2, "seperator_token_id": 3, "unknown_token_id": 1, "padding_token_id": 0}
    tokenizer = tokenizer_with("bert", tokens, [*[CONTROL] * 4, *[NORMAL] * 5], **facts)
    assert tokenizer.encode("Unable, want zzz").tokens == ["[CLS]", "un", "##able", ",", "want", "[UNK]", "[SEP]"]
    assert tokenizer.decode(tokenizer.encode("unable").ids) == "unable"


@pytest.mark.parametrize(
    ("model", "facts", "named"),
    [
        ("t5", {}, "tokenizer.ggml.model is 't5'; supported: gpt2, llama, gemma4, bert"),
        ("gpt2", {"pre": "gpt-2"}, "tokenizer.ggml.merges is missing"),
        ("gemma4", {}, "tokenizer.ggml.merges is missing"),
        ("llama", {"tokens": ["a" * (1 << 15)]}, "tokenizer.ggml.tokens has too long pieces"),
        ("llama", {"tokens": []}, "tokenizer.ggml.tokens is missing"),
    ],
)
def test_a_vocabulary_that_makes_no_tokenizer_is_refused(model: str, facts: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        tokenizer_with(model, facts.pop("tokens", ["a", "b"]), [], **facts)


@pytest.mark.parametrize(
    ("facts", "named"),
    [
        (
            {"architecture": "rwkv7"},
            "architecture rwkv7 is not supported in GGUF; supported: bert, cohere2, falcon-h1, gemma-embedding, ",
        ),
        ({"architecture": "gemma4"}, "gemma4.attention.sliding_window_pattern is missing"),
        ({"architecture": "gpt2"}, "gpt2.attention.layer_norm_epsilon of the metadata is None but must be a number"),
        ({"ids": {"eos": 100_000}}, "tokenizer.ggml.eos_token_id is 100000, but the file has"),
    ],
)
def test_a_file_that_cannot_be_described_is_refused(facts: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=named):
        _described(tmp_path, **facts)


def test_named_templates_of_a_file_are_those_of_the_model(tmp_path: Path) -> None:
    writer: Any = GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_chat_template([{"name": "default", "template": "x"}, {"name": "tool_use", "template": "y"}])
    metadata = {key: field.value for key, field in writer.kv_data[0].items() if isinstance(field.value, str)}
    assert metadata["tokenizer.chat_template"] == "x"
    assert named_templates(metadata | {TOKENIZER_LISTS[0]: []}) == {"tool_use": "y"}
