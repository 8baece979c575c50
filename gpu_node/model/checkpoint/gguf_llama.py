"""Describe a GGUF file of a Llama with a byte-level tokenizer as transformers does, without transformers.

For a vocabulary of 128,256 tokens, transformers takes 15 seconds with its import, and this module half a second. Tests
compare the files byte for byte. A file that is unusual in any way is left to transformers.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.checkpoint.gguf_file import GgufHeader
from penstock.gpu_node.model.checkpoint.gguf_tokenizer import (
    CONTROL,
    TOKENIZER_LISTS,
    USER_DEFINED,
    chat_template_of,
    follow_llama_cpp,
)
from penstock.gpu_node.model.protocol import WrittenTokenizer
from penstock.runtime.reading import reason_of

_SIZES = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "embedding_length": "hidden_size",
    "rope.dimension_count": "head_dim",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}
_EPSILON, _THETA = "llama.attention.layer_norm_rms_epsilon", "llama.rope.freq_base"
_TOKENS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""The names of special tokens in config.json and in GGUF, in the order in which transformers adds them."""
_DEFAULTS = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "dtype": "bfloat16",
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "mlp_bias": False,
    "model_type": "llama",
    "pad_token_id": None,
    "pretraining_tp": 1,
    "use_cache": True,
}
_IN_BYTE_ALPHABET = re.compile("[!-~¡-¬®-\u0143]*")
_UNLIMITED = int(1e30)


def describe_llama(header: GgufHeader, folder: Path) -> WrittenTokenizer | None:
    """Write the config and tokenizer to a new `folder`. Return the tokenizer, or None for an unusual file.

    An unusual file needs transformers, and nothing is written.

    header: with its `TOKENIZER_LISTS`.
    """
    config = _config(header)
    if config is None or not has_plain_tokenizer(header.metadata):
        return None
    return write_description(header, config, folder)


def write_description(header: GgufHeader, config: Mapping[str, Any], folder: Path) -> WrittenTokenizer:
    """Write a config, with what all configs have, and the byte-level tokenizer of a file to a new `folder`."""
    metadata = header.metadata
    special, tokens = special_ids(metadata), metadata[TOKENIZER_LISTS[0]]
    template = metadata.get("tokenizer.chat_template")
    named = {f"{name}_token": None if token_id is None else tokens[token_id] for name, token_id in special.items()}
    tokenizer = _tokenizer(metadata, named)
    folder.mkdir()
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    if template is not None:
        text = chat_template_of(metadata, template)
        (folder / "chat_template.jinja").write_text(text, encoding="utf-8")
    facts = {"backend": "tokenizers", "is_local": True, "local_files_only": False, "model_max_length": _UNLIMITED}
    _write(folder / "tokenizer_config.json", {**facts, **named, "tokenizer_class": "TokenizersBackend"})
    _write(folder / "config.json", config)
    ids = {f"{name}_token_id": config.get(f"{name}_token_id") for name in ("bos", "eos", "pad")}
    generation = {name: token_id for name, token_id in ids.items() if token_id is not None}
    facts = {"_from_model_config": True, "output_attentions": False, "output_hidden_states": False, "use_cache": True}
    _write(folder / "generation_config.json", {**facts, **generation, "transformers_version": transformers_version()})
    return tokenizer


def _config(header: GgufHeader) -> dict[str, Any] | None:
    """Return the content of config.json, or None for metadata that is unusual."""
    metadata = header.metadata
    name = metadata.get("general.name")
    if metadata.get("general.architecture") != "llama" or name == "mistral" or not isinstance(name, str | None):
        return None
    sizes: dict[str, Any] = {field: metadata.get(f"llama.{key}") for key, field in _SIZES.items()}
    sizes["vocab_size"] = metadata.get("llama.vocab_size", len(metadata.get(TOKENIZER_LISTS[0], ())))
    floats = {"rms_norm_eps": metadata.get(_EPSILON), "rope_theta": metadata.get(_THETA)}
    if not all(type(size) is int and size > 0 for size in sizes.values()):
        return None
    if not all(isinstance(value, float) for value in floats.values()):
        return None
    if sizes["hidden_size"] % sizes["num_attention_heads"]:
        return None
    return {
        **_DEFAULTS,
        **sizes,
        **{f"{name}_token_id": token_id for name, token_id in special_ids(metadata).items() if token_id is not None},
        **({} if name is None else {"_model_name_or_path": name}),
        "rms_norm_eps": floats["rms_norm_eps"],
        "rope_parameters": {"rope_theta": floats["rope_theta"], "rope_type": "default"},
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "transformers_version": transformers_version(),
    }


def special_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ids of the special tokens by their names in config.json; None for those that the file lacks."""
    return {name: metadata.get(f"tokenizer.ggml.{its}_token_id") for name, its in _TOKENS.items()}


def has_plain_tokenizer(metadata: Mapping[str, Any]) -> bool:
    """Return whether a file has a byte-level tokenizer with all of its lists, and special tokens in its vocabulary."""
    tokens, kinds, merges = (metadata.get(name) or () for name in TOKENIZER_LISTS)
    ids = special_ids(metadata).values()
    return (
        metadata.get("tokenizer.ggml.model") == "gpt2"
        and bool(tokens and kinds and merges)
        and len(tokens) == len(kinds)
        and metadata.get("tokenizer.chat_template", "a template") != ""
        and all(isinstance(token_id, int | None) and (token_id or 0) < len(tokens) for token_id in ids)
    )


def _tokenizer(metadata: Mapping[str, Any], named: Mapping[str, str | None]) -> WrittenTokenizer:
    """Return the tokenizer. `named`: the special tokens by name."""
    tokens, kinds, merges = (metadata[name] for name in TOKENIZER_LISTS)
    alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    spellings = _spellings(tokens, alphabet)
    vocab = {spelling: index for index, spelling in enumerate(spellings)}
    pairs = [tuple(merge.split(" ")) for merge in merges]
    try:
        backend = Tokenizer(BPE(vocab=vocab, merges=pairs, continuing_subword_prefix="", end_of_word_suffix=""))
    except Exception as error:
        # The library raises its base class.
        reason = reason_of(error)
        raise ConfigError(f"tokenizer.ggml.merges does not fit tokenizer.ggml.tokens: {reason}") from error
    backend.decoder = decoders.ByteLevel()
    marked = [index for index, kind in enumerate(kinds) if kind in (CONTROL, USER_DEFINED)]
    control = [tokens[i] for i in marked if kinds[i] == CONTROL and tokens[i] == spellings[i]]
    _add_tokens(backend, control, special=True)
    defined = [tokens[i] for i in marked if kinds[i] == USER_DEFINED]
    _add_tokens(backend, [token for token in defined if backend.token_to_id(token) is not None], special=False)
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    _add_tokens(backend, [token for token in named.values() if token is not None and token not in known], special=True)
    backend = follow_llama_cpp(backend, metadata)
    # Of tokens that are spelled alike, only the last one has an id.
    by_id = [""] * len(tokens)
    for spelling, index in vocab.items():
        by_id[index] = spelling
    return WrittenTokenizer(backend, by_id)


def _spellings(tokens: list[str], alphabet: pre_tokenizers.ByteLevel) -> list[str]:
    """Return the tokens in the byte alphabet, in which most vocabularies are already."""
    if _IN_BYTE_ALPHABET.fullmatch("".join(tokens)) is not None:
        return tokens
    return [
        token
        if _IN_BYTE_ALPHABET.fullmatch(token) is not None
        else "".join(part for part, _ in alphabet.pre_tokenize_str(token))
        for token in tokens
    ]


def _add_tokens(backend: Tokenizer, tokens: list[str], *, special: bool) -> None:
    backend.add_tokens([AddedToken(token, normalized=False, special=special) for token in tokens])


def transformers_version() -> str:
    """Return the version of transformers whose files these are like."""
    return importlib.metadata.version("transformers")


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
