"""A name for what a model computes, equal wherever the same files are loaded the same way."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

_SAMPLES = 64
_SAMPLE_BYTES = 4096
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
_CONFIG_FILES = ("config.json", "generation_config.json")


def revision_of(folder: Path, weight_files: list[Path], dtype: str) -> str:
    """32 hex digits over tokenizer, configs, dtype and the weight files' sizes and samples spread over each.

    Samples and not every byte, because a node of a large model should not read all of it twice to start.
    """
    digest = hashlib.blake2b(dtype.encode(), digest_size=16)
    for name in _TOKENIZER_FILES:
        path = folder / name
        if path.is_file():
            digest.update(name.encode() + path.read_bytes())
    for name in _CONFIG_FILES:
        path = folder / name
        if path.is_file():
            digest.update(name.encode() + _config_content(path))
    for path in weight_files:
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            for i in range(_SAMPLES):
                file.seek(max(0, size - _SAMPLE_BYTES) * i // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _config_content(path: Path) -> bytes:
    """What a config says, whichever version of transformers wrote it down."""
    config = json.loads(path.read_bytes())
    config.pop("transformers_version", None)
    return json.dumps(config, sort_keys=True).encode()
