"""Write the config and the tokenizer of a GGUF file as Hugging Face's format has them, from tables of our own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.checkpoint import gguf_attention, gguf_encoders, gguf_hybrid
from penstock.gpu_node.model.checkpoint.generation_config import FILE
from penstock.gpu_node.model.checkpoint.gguf_file import GgufHeader
from penstock.gpu_node.model.checkpoint.gguf_metadata import Metadata, common_fields
from penstock.gpu_node.model.checkpoint.gguf_tokenizer import TOKENIZER_LISTS, chat_template_of, special_ids
from penstock.gpu_node.model.checkpoint.gguf_vocabulary import tokenizer_of
from penstock.gpu_node.model.protocol import WrittenTokenizer

_CONFIGS = {**gguf_attention.CONFIGS, **gguf_encoders.CONFIGS, **gguf_hybrid.CONFIGS}
_UNLIMITED = int(1e30)


def describe(header: GgufHeader, folder: Path) -> WrittenTokenizer:
    """Write the config and the tokenizer of a file to a new `folder`. Return the tokenizer.

    header: with its `TOKENIZER_LISTS`. Raises ConfigError that names what of the metadata is missing or wrong.
    """
    metadata = Metadata(header)
    if metadata.architecture not in _CONFIGS:
        known = ", ".join(sorted(_CONFIGS))
        raise ConfigError(f"architecture {metadata.architecture} is not supported in GGUF; supported: {known}")
    name, kind, config_of = _CONFIGS[metadata.architecture]
    tokenizer = tokenizer_of(metadata.all)
    config = {"architectures": [name], "model_type": kind, **common_fields(metadata), **config_of(metadata)}
    tokens = metadata.all[TOKENIZER_LISTS[0]]
    folder.mkdir()
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    if template := metadata.all.get("tokenizer.chat_template"):
        text = chat_template_of(metadata.all, str(template))
        (folder / "chat_template.jinja").write_text(text, encoding="utf-8")
    named = {
        f"{name}_token": tokens[token_id]
        for name, token_id in special_ids(metadata.all).items()
        if isinstance(token_id, int) and 0 <= token_id < len(tokens)
    }
    facts = {"backend": "tokenizers", "model_max_length": _UNLIMITED, "tokenizer_class": "TokenizersBackend"}
    _write(folder / "tokenizer_config.json", {**facts, **named})
    _write(folder / "config.json", config)
    ids = {f"{name}_token_id": config.get(f"{name}_token_id") for name in ("bos", "eos", "pad")}
    _write(folder / FILE, {name: token_id for name, token_id in ids.items() if token_id is not None})
    return tokenizer


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
