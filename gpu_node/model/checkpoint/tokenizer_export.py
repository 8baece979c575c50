"""Export tokenizers that need transformers to a complete tokenizer.json, once, so that later starts do not need it."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.architecture.limits import (
    MAX_DESCRIPTION_BYTES,
    MAX_TOKENIZER_BYTES,
    MAX_TOKENIZER_ENTRIES,
    MAX_VOCAB,
)
from penstock.gpu_node.model.checkpoint.conversion_cache import built_once
from penstock.gpu_node.model.checkpoint.json_object import read_object, read_within
from penstock.runtime.reading import is_of_content, reason_of

_PATTERNS = ("*token*", "*.model", "vocab*", "merges*", "chat_template*", "additional_chat_templates/*", "config.json")
_WITHOUT_VOCABULARY = re.compile(
    r"(config|tokenizer_config|special_tokens_map|added_tokens)\.json|chat_template.*|.*\.jinja"
)
"""From these files alone, transformers silently makes a tokenizer without a vocabulary."""
_PLAIN_CLASSES = {"PreTrainedTokenizerFast", "TokenizersBackend"}
"""Tokenizer classes that use tokenizer.json unchanged. Other classes read only its vocabulary and merges."""
_EXPORT_VERSION = 2


def plain_tokenizer(folder: Path) -> Path:
    """Return a folder with a complete tokenizer.json: `folder` itself, or else a cached folder with the export.

    Raises ConfigError if there is no tokenizer or no fast one.
    """
    class_name = _class_name(folder)
    if (folder / "tokenizer.json").is_file() and class_name in _PLAIN_CLASSES:
        return folder
    files = sorted({path for pattern in _PATTERNS for path in folder.glob(pattern) if path.is_file()})
    if all(_WITHOUT_VOCABULARY.fullmatch(path.name) for path in files):
        raise ConfigError(f"no tokenizer in {folder}: it has no tokenizer.json")
    digest = hashlib.blake2b(digest_size=8)
    for path in files:
        digest.update(path.name.encode() + tokenizer_content(path))
    name = f"{folder.resolve().name}-{digest.hexdigest()}-tokenizer-v{_EXPORT_VERSION}"
    return built_once(name, lambda target: _export(folder, target))


def tokenizer_content(path: Path) -> bytes:
    """Return the content of a tokenizer's file. Raises ConfigError for a size that takes gigabytes to read; OSError.

    The library takes half a kilobyte for each token of a JSON file, so its entries are counted before it is parsed.
    """
    content = read_within(path, MAX_TOKENIZER_BYTES)
    if path.suffix == ".json":
        counts = (("keys", b":", 1), ("lists", b"[", 1), ("texts", b'"', 10))
        for what, sign, share in counts:
            if (found := content.count(sign)) > share * MAX_TOKENIZER_ENTRIES:
                most = f"a vocabulary of {MAX_VOCAB:,} tokens has at most {share * MAX_TOKENIZER_ENTRIES:,}"
                raise ConfigError(f"no usable tokenizer in {path}: {found:,} signs {sign.decode()} of {what}; {most}")
    return content


def why_unreadable(path: Path, error: BaseException) -> str:
    """Return what is wrong with a tokenizer.json that the library refuses, whose errors name lines and no fields.

    A field is to blame if the file can be read without it.
    """
    reason = reason_of(error)
    if not path.is_file() or path.stat().st_size > MAX_DESCRIPTION_BYTES or _is_readable(content := read_object(path)):
        return reason
    model = content.get("model")
    if not isinstance(model, dict):
        return f"the field model is {str(model)[:100]!r} but must be an object: {reason}"
    fields = [name for name in content if name != "model" and _is_readable(_without(content, name))]
    fields += [
        f"model.{name}" for name in model if _is_readable(content | {"model": _without(model, name)}) and name != "type"
    ]
    return f"the field {fields[0] if fields else 'model (its vocab, merges or type)'} cannot be used: {reason}"


def _without(fields: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key != name}


def _is_readable(content: dict[str, Any]) -> bool:
    from tokenizers import Tokenizer

    try:
        Tokenizer.from_str(json.dumps(content))
    except BaseException as error:
        if not is_of_content(error):
            raise
        return False
    return True


def _class_name(folder: Path) -> str | None:
    path = folder / "tokenizer_config.json"
    config = read_object(path) if path.is_file() else {}
    extra = config.get("extra_special_tokens")
    tokens = list(extra.values()) if isinstance(extra, dict) else extra or []
    if not isinstance(tokens, list) or not all(isinstance(token, str | dict) for token in tokens):
        raise ConfigError(
            f"{path}: extra_special_tokens is {str(extra)[:100]!r} but must be a list or an object of tokens"
        )
    name = config.get("tokenizer_class")
    if not isinstance(name, str | None):
        raise ConfigError(f"{path}: tokenizer_class is {str(name)[:100]!r} but must be the name of a class")
    return name


def _export(folder: Path, target: Path) -> None:
    from transformers import AutoTokenizer

    auto_tokenizer: Any = AutoTokenizer
    try:
        tokenizer = auto_tokenizer.from_pretrained(folder, trust_remote_code=False)
    except BaseException as error:
        # A third-party parser may raise any exception for files of unknown origin, and ask for packages.
        if not is_of_content(error) and not isinstance(error, ImportError):
            raise
        reason = why_unreadable(folder / "tokenizer.json", error)
        raise ConfigError(f"no usable tokenizer in {folder}: {reason}") from error
    if not tokenizer.is_fast:
        raise ConfigError(f"the tokenizer in {folder} cannot be written as a tokenizer.json")
    tokenizer.save_pretrained(target)
    if tokenizer.chat_template is None and (template := folder / "chat_template.json").is_file():
        shutil.copy(template, target)
