"""What llama.cpp takes for granted of a GGUF file's tokenizer, and transformers does not know or does otherwise.

A file names its tokenizer (`tokenizer.ggml.model`, `tokenizer.ggml.pre`). How words are split, whether a text begins
with BOS, and which tokens end an answer is known by these names and by the texts of tokens.
https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from penstock.contract.errors import ConfigError

TOKENIZER_LISTS = ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.merges")
BYTE_LEVEL, _SENTENCE_PIECE = "gpt2", "llama"
CONTROL, USER_DEFINED = 3, 4
"""Token types of special tokens, and of words that are never split."""

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
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), (_LLAMA3,)),
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
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _OLD_ASIAN, r"\p{N}"),
    "falcon": (r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]"),
    "default": (r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
}
"""Names of `tokenizer.ggml.pre`, and the patterns that split a text one after another."""
_IGNORE_MERGES = frozenset(
    ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano")
) | {"tekken", "minicpm5"}
"""The names of tokenizers for which a word of the vocabulary is one token, whatever the merges say."""
_BEGIN_WITH_BOS = _IGNORE_MERGES - {"minicpm5"}
"""The names of tokenizers that put BOS before a text if the file does not say whether."""


def follow_llama_cpp(backend: Tokenizer, metadata: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer as llama.cpp has it, which may be the one that is given, changed.

    metadata: with `TOKENIZER_LISTS`. Raises ConfigError for a name of `tokenizer.ggml.pre` that is not known.
    """
    model = metadata.get("tokenizer.ggml.model")
    if model == BYTE_LEVEL:
        name = name_of(metadata)
        backend = _with_own_marks(backend, metadata)
        backend.pre_tokenizer = _splits(name)
        backend.model.ignore_merges = name in _IGNORE_MERGES
    elif model == _SENTENCE_PIECE:
        _put_spaces(backend, metadata)
        ends = [AddedToken(text, normalized=False, special=True) for text in _known_ends(metadata)]
        known = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
        backend.add_special_tokens([end for end in ends if end.content not in known])
    if model in (BYTE_LEVEL, _SENTENCE_PIECE):
        backend.post_processor = _frame(backend, metadata)
    return backend


def name_of(metadata: Mapping[str, Any]) -> str:
    """Return the name of a byte-level tokenizer. Raises ConfigError for an unknown one."""
    name = metadata.get("tokenizer.ggml.pre") or "default"
    if name not in _PATTERNS:
        known = ", ".join(sorted(_PATTERNS))
        raise ConfigError(f"tokenizer.ggml.pre is {name!r}, for which no pattern of words is known; known: {known}")
    return str(name)


def _splits(name: str) -> pre_tokenizers.PreTokenizer:
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


def _marks(metadata: Mapping[str, Any]) -> dict[int, bool]:
    """Return the ids of tokens that no text is split in, and whether each is a special token.

    A token that ends an answer by its text is special, whatever its type is.
    """
    kinds: Sequence[int] = metadata.get(TOKENIZER_LISTS[1]) or ()
    marks = {at: kind == CONTROL for at, kind in enumerate(kinds) if kind in (CONTROL, USER_DEFINED)}
    return marks | dict.fromkeys(_known_ends(metadata).values(), True)


def _with_own_marks(backend: Tokenizer, metadata: Mapping[str, Any]) -> Tokenizer:
    """Return a byte-level tokenizer with the special tokens of the file, and with no others.

    transformers spells a special token in the alphabet of bytes if it has letters outside it, so that no text has it:
    those of DeepSeek, for example. And it adds `<|endoftext|>` to every vocabulary.
    """
    tokens: Sequence[str] = metadata[TOKENIZER_LISTS[0]]
    marks = _marks(metadata)
    added = backend.get_added_tokens_decoder()
    respelled = {at: spelling for at in marks if (spelling := backend.id_to_token(at)) != tokens[at]}
    if respelled or any(at >= len(tokens) for at in added):
        content = json.loads(backend.to_str())
        content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < len(tokens)]
        vocab = content["model"]["vocab"]
        for at, spelling in respelled.items():
            vocab.pop(spelling, None)
            vocab[tokens[at]] = at
        backend = Tokenizer.from_str(json.dumps(content))
        added = backend.get_added_tokens_decoder()
    # A word that is there twice has only one id.
    new = [at for at in marks if backend.token_to_id(tokens[at]) == at]
    new = [at for at in new if at not in added or added[at].special != marks[at]]
    backend.add_special_tokens([AddedToken(tokens[at], normalized=False, special=True) for at in new if marks[at]])
    backend.add_tokens([AddedToken(tokens[at], normalized=False) for at in new if not marks[at]])
    return backend


def _put_spaces(backend: Tokenizer, metadata: Mapping[str, Any]) -> None:
    """Put a space before a text, and before one that follows a special token, if the file does not forbid it."""
    architecture = str(metadata.get("general.architecture"))
    has_prefix = metadata.get("tokenizer.ggml.add_space_prefix", not architecture.startswith("gemma"))
    if has_prefix or not architecture.startswith("gemma"):
        spaces = normalizers.Replace(" ", "\u2581")
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), spaces]) if has_prefix else spaces
        backend.pre_tokenizer = None
        text = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder = decoders.Sequence([*text, decoders.Strip(" ", 1, 0)] if has_prefix else text)
    name = str(metadata.get("general.name", "")).lower()
    if architecture == "phi3" and ("phi-3" in name or "phi3" in name):
        tokens, kinds = (metadata[key] for key in TOKENIZER_LISTS[:2])
        marks = [token for token, kind in zip(tokens, kinds, strict=True) if kind in (CONTROL, USER_DEFINED)]
        kept = {"<unk>", "<s>", "<|endoftext|>"}
        absorbing = [
            AddedToken(mark, normalized=False, rstrip=True, special=True) for mark in marks if mark not in kept
        ]
        backend.add_special_tokens(absorbing)


# --- the tokens around a text, and after an answer

_DEFAULT_IDS: dict[str, Mapping[str, int]] = {_SENTENCE_PIECE: {"bos": 1, "eos": 2}}


def special_id(metadata: Mapping[str, Any], name: str) -> int | None:
    """Return the id of `bos`, `eos`, `eot`, …; None if the file has none that is in its vocabulary."""
    default = _DEFAULT_IDS.get(str(metadata.get("tokenizer.ggml.model")), {}).get(name)
    token_id = metadata.get(f"tokenizer.ggml.{name}_token_id", default)
    size = len(metadata.get(TOKENIZER_LISTS[0]) or ())
    return token_id if isinstance(token_id, int) and 0 <= token_id < size else None


def check_special_ids(metadata: Mapping[str, Any]) -> None:
    """Refuse lists of different lengths, and a special token that is not in the vocabulary. Raises ConfigError.

    Of other tokenizers than byte-level ones, llama.cpp ignores such a token, except the padding, which transformers
    looks up.
    """
    size = len(metadata.get(TOKENIZER_LISTS[0]) or ())
    if (kinds := metadata.get(TOKENIZER_LISTS[1])) and len(kinds) != size:
        raise ConfigError(f"{TOKENIZER_LISTS[1]} has {len(kinds)} values, but {TOKENIZER_LISTS[0]} has {size}")
    is_byte_level = metadata.get("tokenizer.ggml.model") == BYTE_LEVEL
    for name in ("bos", "eos", "unknown", "padding") if is_byte_level else ("padding",):
        token_id = metadata.get(key := f"tokenizer.ggml.{name}_token_id")
        if token_id is not None and (not isinstance(token_id, int) or not 0 <= token_id < size):
            raise ConfigError(f"{key} is {token_id!r}, but the file has {size} tokens")


def begins_with_bos(metadata: Mapping[str, Any]) -> bool:
    """Return whether a text begins with BOS."""
    is_default = metadata.get("tokenizer.ggml.model") == _SENTENCE_PIECE
    is_default = is_default or metadata.get("tokenizer.ggml.pre") in _BEGIN_WITH_BOS
    return metadata.get("tokenizer.ggml.add_bos_token", is_default) is True


def _frame(backend: Tokenizer, metadata: Mapping[str, Any]) -> TemplateProcessing:
    """Return the processor that adds the special tokens around a text."""
    wanted = {"bos": begins_with_bos(metadata), "eos": metadata.get("tokenizer.ggml.add_eos_token") is True}
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
