"""Reads the tokenizer files of a model folder without transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from penstock.contract.errors import ConfigError

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_Token = str | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """A tokenizer as its files describe it."""

    backend: Tokenizer
    special_tokens: Mapping[str, str]
    """Texts of the special tokens, by name: `eos_token`, …"""
    chat_template: str | None


def read_tokenizer_files(folder: Path, read: Tokenizer | None = None) -> TokenizerFiles:
    """Read tokenizer.json and its companion files. Raises ConfigError for files that cannot be read.

    read: the content of tokenizer.json, if it is already in memory.
    """
    config = _read_object(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        # Older versions of transformers wrote special tokens into a second file, newer ones into the config alone.
        config |= _read_object(folder / "special_tokens_map.json")
    backend = _read_backend(folder / "tokenizer.json") if read is None else read
    # A tokenizer.json may contain the truncation and padding of its training. They must not apply to prompts.
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = bool(config.get("split_special_tokens", False))
    named = dict(_named_tokens(config))
    _add_tokens(backend, config, named)
    special_tokens = {name: _added_token(token).content for name, token in named.items()}
    return TokenizerFiles(backend, special_tokens, _chat_template(folder, config))


def _read_backend(path: Path) -> Tokenizer:
    try:
        backend: Tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:
        # The library raises plain exceptions for any problem of the file.
        raise ConfigError(f"no usable tokenizer in {path}: {error}") from error
    return backend


def _add_tokens(backend: Tokenizer, config: Mapping[str, Any], named: Mapping[str, _Token]) -> None:
    """Add tokens that the config adds or redefines, and special tokens that neither file lists."""
    listed = sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0]))
    if listed:
        backend.add_tokens([_added_token(token) for _, token in listed])
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or ()
    special = [
        _added_token(token, special=True) for token in (*named.values(), *(extra if isinstance(extra, list) else ()))
    ]
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    backend.add_special_tokens([token for token in special if token.content not in known])


def _named_tokens(config: Mapping[str, Any]) -> Iterator[tuple[str, _Token]]:
    """Yield `eos_token` and other named special tokens, as the config has them."""
    extra = config.get("extra_special_tokens")
    for name, token in (*config.items(), *(extra.items() if isinstance(extra, dict) else ())):
        is_token = isinstance(token, str) or (isinstance(token, dict) and "content" in token)
        if name.endswith("_token") and is_token:
            yield name, token


def _added_token(token: _Token, **flags: bool) -> AddedToken:
    """Return a token from its text alone, or from its text and flags."""
    if isinstance(token, str):
        return AddedToken(token, normalized=False, **flags)
    return AddedToken(token["content"], **({flag: token[flag] for flag in _FLAGS if flag in token} | flags))


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Return the default template: from its own file, else from the config, which may have several by name."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        by_name = {named["name"]: named["template"] for named in template}
        template = by_name.get("default")
    return template if isinstance(template, str) else None


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return content
