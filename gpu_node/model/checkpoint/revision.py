"""Compute the revision of a loaded model, which is equal wherever the same files are loaded the same way."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from penstock.gpu_node.model.checkpoint.conversion_cache import samples
from penstock.gpu_node.model.checkpoint.mapped_file import stamp_of
from penstock.gpu_node.model.checkpoint.source import ModelSource
from penstock.gpu_node.model.checkpoint.stored_tensors import weight_files

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
_CONFIG_FILES = ("config.json", "generation_config.json")


def revision_of(source: ModelSource, arithmetic: str) -> str:
    """Return 32 hex digits over the tokenizer, the configs, samples of the weight files, and the arithmetic.

    The digest covers samples instead of all bytes, because a node should not read a large model twice at start. Folder
    names and the name of a GGUF file do not count, because machines keep the same model under different paths.
    """
    digest = hashlib.blake2b(arithmetic.encode(), digest_size=16)
    for path in _present(source, _TOKENIZER_FILES):
        digest.update(path.name.encode() + path.read_bytes())
    return _with_weights(digest, source)


def weights_revision_of(source: ModelSource, arithmetic: str) -> str:
    """Return what `revision_of` does, but without the tokenizer, whose file is large."""
    return _with_weights(hashlib.blake2b(arithmetic.encode(), digest_size=16), source)


def _with_weights(digest: hashlib.blake2b, source: ModelSource) -> str:
    for path in _present(source, _CONFIG_FILES):
        config = json.loads(path.read_bytes())
        # Neither the transformers version that wrote a config nor its layout counts.
        config.pop("transformers_version", None)
        digest.update(path.name.encode() + json.dumps(config, sort_keys=True).encode())
    for path in weight_files(source):
        for sample in samples(path):
            digest.update(sample)
    return digest.hexdigest()


def stamps_of(paths: Iterable[Path]) -> list[tuple[int, ...]]:
    """Return the stamps of files, which change when one of them is written or replaced."""
    return [stamp_of(path.stat()) for path in paths]


def stamps_of_source(source: ModelSource) -> list[tuple[int, ...]]:
    """Return the stamps of all files on which the revision depends."""
    return stamps_of([*_present(source, (*_TOKENIZER_FILES, *_CONFIG_FILES)), *weight_files(source)])


def _present(source: ModelSource, names: Iterable[str]) -> list[Path]:
    return [path for name in names if (path := source.folder / name).is_file()]
