"""What llama.cpp takes for granted of a GGUF file's tokenizer.

A file names its tokenizer (`tokenizer.ggml.model`, `tokenizer.ggml.pre`). How words are split, whether a text begins
with BOS, and which tokens end an answer is known by these names and by the texts of tokens.
https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Regex, Tokenizer, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from penstock.contract.errors import ConfigError

TOKENIZER_LISTS = (
    *("tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.merges", "tokenizer.ggml.scores"),
)
BYTE_LEVEL, SENTENCE_PIECE, GEMMA4, WORD_PIECE = "gpt2", "llama", "gemma4", "bert"
"""Kinds of tokenizers, as `tokenizer.ggml.model` names them."""
UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6
"""Token types: of the unknown token, of special tokens, of words that are never split, and of single bytes."""

# --- splitting a text into words

_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)
"""Words that end where a small letter is followed by a capital one."""
_SIGNS, _SIGNS_AND_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_ASIAN = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_OLD_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_BEFORE_POINTS = r" ?[^(\s|.,!?…。，、।۔،)]+"


def _joined(*choices: str) -> str:
    return "|".join(choices)


def _words(number: str) -> str:
    """Return Llama 3's pattern with another one for numbers."""
    return _joined(_CONTRACTION, r"[^\r\n\p{L}\p{N}]?\p{L}+", number, _SIGNS, _SPACE)


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3, _QWEN2 = _words(r"\p{N}{1,3}"), _words(r"\p{N}")
_TEKKEN = _joined(*_CASED, r"\p{N}", _SIGNS_AND_SLASHES, _SPACE)
_GPT4O = _joined(*(word + _CONTRACTION + "?" for word in _CASED), r"\p{N}{1,3}", _SIGNS_AND_SLASHES, _SPACE)
_QWEN35 = _joined(_CONTRACTION, r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", r"\p{N}", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", _SPACE)
_DEEPSEEK3 = _joined(
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+",
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
    r" ?[\p{P}\p{S}]+[\r\n]*",
    _SPACE,
)
_SEED = _joined(_CONTRACTION, r"[^\r\n\p{L}\p{N}]?\p{L}+", r"\p{N}", r" ?[^\s\p{L}\p{N}\r\n]+", _SPACE)
_UFAKZEKA = _joined(r"[^\r\n\p{L}\p{N}]?\p{L}+", r"\p{N}", _SIGNS, _SPACE)
_PATTERNS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "midm-2.0", "lfm2"), (_LLAMA3,)),
    **dict.fromkeys(("falcon-h1", "jina-v5-nano"), (_LLAMA3,)),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "glm5", "chatglm-bpe"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan"), (_QWEN2,)),
    **dict.fromkeys(("solar-open", "grok-2"), (_QWEN2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), (r"\p{N}", _GPT2)),
    **dict.fromkeys(("minerva-7b", "mellum2"), (r"\p{N}", _GPT2)),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4"), (_GPT2,)),
    **dict.fromkeys(("gigachat", "a.x-4.0", "mellum", "modern-bert"), (_GPT2,)),
    **dict.fromkeys(("jina-es", "jina-de", "jina-v2-es", "jina-v2-de"), (_GPT2,)),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), (_GPT4O,)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), (r"\p{N}{1,3}", _ASIAN, _DEEPSEEK3)),
    **dict.fromkeys(("poro-chat", "bloom", "gpt3-finnish"), (_BEFORE_POINTS,)),
    "viking": (_BEFORE_POINTS, r"\p{N}"),
    "qwen35": (_QWEN35,),
    "tekken": (_TEKKEN,),
    "seed-coder": (_SEED,),
    "ufakzeka": (_UFAKZEKA,),
    "minicpm5": (r"\p{N}{1,3}", _words(r"\p{N}+")),
    "deepseek-llm": (
        *(r"[\r\n]", r"\s?[\p{Lu}\p{Ll}\p{Lt}]+", "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"),
        *(r"\s+$", _OLD_ASIAN, r"\p{N}+"),
    ),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _OLD_ASIAN, r"\p{N}"),
    "falcon": (r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]"),
    "default": (r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
}
"""Names of `tokenizer.ggml.pre`, and the patterns that split a text one after another."""
IGNORE_MERGES = frozenset(
    ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano")
) | {"tekken", "minicpm5", "glm4", "glm5"}
"""The names of tokenizers for which a word of the vocabulary is one token, whatever the merges say."""
_BEGIN_WITH_BOS = IGNORE_MERGES - {"minicpm5", "glm4", "glm5"}
"""The names of tokenizers that put BOS before a text if the file does not say whether."""


def name_of(metadata: Mapping[str, Any]) -> str:
    """Return the name of a byte-level tokenizer. Raises ConfigError for an unknown one."""
    name = metadata.get("tokenizer.ggml.pre") or "default"
    if name not in _PATTERNS:
        known = ", ".join(sorted(_PATTERNS))
        raise ConfigError(f"tokenizer.ggml.pre is {name!r}, for which no pattern of words is known; known: {known}")
    return str(name)


def splits_of(name: str) -> pre_tokenizers.PreTokenizer:
    *earlier, last = _PATTERNS[name]
    splits: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in earlier
    ]
    if last == _GPT2:
        splits.append(pre_tokenizers.ByteLevel(add_prefix_space=False))
    else:
        splits.append(pre_tokenizers.Split(Regex(last), behavior="isolated"))
        splits.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    return splits[0] if len(splits) == 1 else pre_tokenizers.Sequence(splits)


def marks_of(metadata: Mapping[str, Any]) -> dict[int, bool]:
    """Return the ids of tokens that no text is split in, and whether each is a special token.

    A token that ends an answer by its text is special, whatever its type is.
    """
    kinds: Sequence[int] = metadata.get(TOKENIZER_LISTS[1]) or ()
    marks = {at: kind != USER_DEFINED for at, kind in enumerate(kinds) if kind in (UNKNOWN, CONTROL, USER_DEFINED)}
    return marks | dict.fromkeys(_known_ends(metadata).values(), True)


# --- the tokens around a text, and after an answer

_DEFAULT_IDS: dict[str, Mapping[str, int]] = {
    SENTENCE_PIECE: {"bos": 1, "eos": 2, "unknown": 0},
    WORD_PIECE: {"bos": 101, "eos": 102, "unknown": 100},
}
_NAMES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""The names of special tokens in config.json and in GGUF."""
_NAMES_OF_WORD_PIECE = {"bos": "cls", "eos": "seperator"}
"""What a file with such a tokenizer calls the tokens around a text."""


def special_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ids of the special tokens by their names in config.json; None for those that the file lacks."""
    return {name: metadata.get(f"tokenizer.ggml.{its}_token_id") for name, its in _NAMES.items()}


def special_id(metadata: Mapping[str, Any], name: str) -> int | None:
    """Return the id of `bos`, `eos`, `eot`, …; None if the file has none that is in its vocabulary."""
    model = metadata.get("tokenizer.ggml.model")
    default = _DEFAULT_IDS.get(str(model), {}).get(name)
    own = _NAMES_OF_WORD_PIECE.get(name, name) if model == WORD_PIECE else name
    token_id = metadata.get(f"tokenizer.ggml.{own}_token_id", default)
    if token_id is None and model == BYTE_LEVEL:
        # Encoders with byte-level tokens, as ModernBERT, may name their marks alone.
        token_id = metadata.get(f"tokenizer.ggml.{_NAMES_OF_WORD_PIECE.get(name, name)}_token_id")
    size = len(metadata.get(TOKENIZER_LISTS[0]) or ())
    return token_id if isinstance(token_id, int) and 0 <= token_id < size else None


def check_special_ids(metadata: Mapping[str, Any]) -> None:
    """Refuse lists of different lengths, and a special token that is not in the vocabulary. Raises ConfigError.

    Of other tokenizers than byte-level ones, llama.cpp ignores such a token, except the padding.
    """
    size = len(metadata.get(TOKENIZER_LISTS[0]) or ())
    for key in (TOKENIZER_LISTS[1], TOKENIZER_LISTS[3]):
        if (values := metadata.get(key)) and len(values) != size:
            raise ConfigError(f"{key} has {len(values)} values, but {TOKENIZER_LISTS[0]} has {size}")
    is_byte_level = metadata.get("tokenizer.ggml.model") == BYTE_LEVEL
    for name in ("bos", "eos", "unknown", "padding") if is_byte_level else ("padding",):
        token_id = metadata.get(key := f"tokenizer.ggml.{name}_token_id")
        if token_id is not None and (not isinstance(token_id, int) or not 0 <= token_id < size):
            raise ConfigError(f"{key} is {token_id!r}, but the file has {size} tokens")


def begins_with_bos(metadata: Mapping[str, Any]) -> bool:
    """Return whether a text begins with BOS."""
    model = metadata.get("tokenizer.ggml.model")
    if model in (GEMMA4, WORD_PIECE):
        return True
    is_default = model == SENTENCE_PIECE or metadata.get("tokenizer.ggml.pre") in _BEGIN_WITH_BOS
    return metadata.get("tokenizer.ggml.add_bos_token", is_default) is True


def frame_of(backend: Tokenizer, metadata: Mapping[str, Any]) -> TemplateProcessing:
    """Return the processor that adds the special tokens around a text."""
    ends = metadata.get("tokenizer.ggml.model") == WORD_PIECE or metadata.get("tokenizer.ggml.add_eos_token") is True
    wanted = {"bos": begins_with_bos(metadata), "eos": ends}
    ids = {name: special_id(metadata, name) if is_wanted else None for name, is_wanted in wanted.items()}
    bos, eos = (None if token_id is None else backend.id_to_token(token_id) for token_id in ids.values())
    single, second = (
        " ".join([f"{token}:{i}" for token in (bos, text, eos) if token is not None])
        for i, text in enumerate(("$A", "$B"))
    )
    tokens = {token: token_id for token, token_id in zip((bos, eos), ids.values(), strict=True) if token is not None}
    special = [(token, token_id) for token, token_id in tokens.items() if token_id is not None]
    return TemplateProcessing(single=single, pair=f"{single} {second}", special_tokens=special)


def chat_template_of(metadata: Mapping[str, Any], template: str) -> str:
    """Return a chat template that begins with BOS if texts do: llama.cpp adds it where the template does not."""
    token_id = special_id(metadata, "bos") if begins_with_bos(metadata) else None
    bos = None if token_id is None else metadata[TOKENIZER_LISTS[0]][token_id]
    if bos is None or "bos_token" in template or bos in template:
        return template
    return "{{- " + json.dumps(bos) + " }}" + template


_NAMED_TEMPLATE = re.compile(r"tokenizer\.chat_template\.([\w-]+)")


def named_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates beside the default one by name, such as `tool_use`."""
    found = {match[1]: text for key, text in metadata.items() if (match := _NAMED_TEMPLATE.fullmatch(key))}
    return {name: chat_template_of(metadata, text) for name, text in found.items() if isinstance(text, str)}


_ENDS = frozenset(
    ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>")
) | {
    *("<end_of_turn>", "<turn|>", "<|tool_response>", "<end_of_utterance>", "<EOT>", "_<EOT>", "[EOT]", "[e~["),
    *("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<｜end▁of▁sentence｜>"),
    *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|file_sep|>"),
    *("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
}
"""Texts of tokens that end an answer in llama.cpp, whatever else the file says."""
_TAG = "</s>"
"""For Gemma it is a tag of HTML and no special token. It ends answers in llama.cpp, but not here."""


def end_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Return the tokens that end an answer: those that the file names, and those with one of the known texts."""
    named = {special_id(metadata, name) for name in ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")}
    return sorted({token_id for token_id in (*named, *_known_ends(metadata).values()) if token_id is not None})


def _known_ends(metadata: Mapping[str, Any]) -> dict[str, int]:
    tokens: Sequence[str] = metadata.get(TOKENIZER_LISTS[0]) or ()
    kinds: Sequence[int] = metadata.get(TOKENIZER_LISTS[1]) or ()
    known = {text: token_id for token_id, text in enumerate(tokens) if text in _ENDS}
    if known.keys() & {"<|call|>", "<|calls|>"} and known.keys() & {"<|return|>", "<|flush|>"}:
        known.pop("<|end|>", None)  # It ends a message of an answer, not the answer.
    if kinds and _TAG in known and kinds[known[_TAG]] != CONTROL:
        del known[_TAG]
    return known
