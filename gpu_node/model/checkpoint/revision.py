"""A name for what a model computes, equal wherever the same files are loaded the same way."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from penstock.gpu_node.model.checkpoint.conversion_cache import samples
from penstock.gpu_node.model.checkpoint.files import weight_files
from penstock.gpu_node.model.checkpoint.source import ModelSource

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
_CONFIG_FILES = ("config.json", "generation_config.json")


def revision_of(source: ModelSource, arithmetic: str) -> str:
    """32 hex digits over tokenizer, configs, the weight files' sizes and samples, and how they are computed with.

    Samples and not every byte, because a node of a large model should not read all of it twice to start. Neither
    folders nor a GGUF file's name count: machines keep the same model in different places.
    """
    digest = hashlib.blake2b(arithmetic.encode(), digest_size=16)
    for name in _TOKENIZER_FILES:
        path = source.folder / name
        if path.is_file():
            digest.update(name.encode() + path.read_bytes())
    for name in _CONFIG_FILES:
        path = source.folder / name
        if path.is_file():
            digest.update(name.encode() + _config_content(path))
    for path in weight_files(source):
        for sample in samples(path):
            digest.update(sample)
    return digest.hexdigest()


def _config_content(path: Path) -> bytes:
    """What a config says, whichever version of transformers wrote it down."""
    config = json.loads(path.read_bytes())
    config.pop("transformers_version", None)
    return json.dumps(config, sort_keys=True).encode()
