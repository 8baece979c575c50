"""The files of a tokenizer, read without transformers: tokenizer.json, and the files beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from penstock.contract.errors import ConfigError
from penstock.gpu_node.engine.text.encoder import check_growth
from penstock.runtime.reading import is_of_content, reading, reason_of

OF_TOOLS = "tool_use"
"""The name of the chat template for chats with tools, in a model with several."""
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_NAMED = frozenset(f"{name}_token" for name in ("bos", "eos", "unk", "pad", "sep", "cls", "mask"))
_SHOWN_CHARS = 200
_Token = str | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """A tokenizer as its files describe it."""

    backend: tokenizers.Tokenizer
    special_tokens: Mapping[str, str]
    """Texts of the special tokens, by name: `eos_token`, …"""
    chat_templates: Mapping[str, str]
    """Chat templates by name; `default` is that of chats without tools."""


def read_tokenizer_files(folder: Path, read: tokenizers.Tokenizer | None = None) -> TokenizerFiles:
    """Read tokenizer.json and its companion files. Raises ConfigError for files that cannot be read.

    read: the content of tokenizer.json, if it is already in memory.
    """
    config = _read_object(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        # Older versions of transformers wrote special tokens into a second file, newer ones into the config alone.
        config |= _read_object(folder / "special_tokens_map.json")
    with reading(folder / "tokenizer.json"):
        backend = _read_backend(folder / "tokenizer.json") if read is None else read
        check_growth(backend)
    # A tokenizer.json may contain the truncation and padding of its training. They must not apply to prompts.
    backend.no_truncation()
    backend.no_padding()
    with reading(folder / "tokenizer_config.json"):
        splits = config.get("split_special_tokens", False)
        if not isinstance(splits, bool | None):
            raise ConfigError(f"split_special_tokens is {_shown(splits)} but must be true or false")
        backend.encode_special_tokens = bool(splits)
        named = dict(_named_tokens(config))
        _check_listed(config.get("added_tokens_decoder"), folder / "tokenizer_config.json")
        _check_ids(backend, folder)
        _add_tokens(backend, config, named)
        _check_ids(backend, folder)
        special_tokens = {name: _added_token(token, name).content for name, token in named.items()}
    return TokenizerFiles(backend, special_tokens, _chat_templates(folder, config))


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    from penstock.gpu_node.model.checkpoint.tokenizer_export import tokenizer_content, why_unreadable

    content = tokenizer_content(path)
    try:
        backend: tokenizers.Tokenizer = tokenizers.Tokenizer.from_buffer(content)
    except BaseException as error:
        if not is_of_content(error):
            raise
        raise ConfigError(f"{path}: {why_unreadable(path, error)}") from error
    return backend


def _check_listed(listed: object, path: Path) -> None:
    """Refuse an added_tokens_decoder that is no object of tokens by id. Raises ConfigError."""
    from penstock.gpu_node.model.architecture.limits import MAX_VOCAB

    wrong = listed
    if isinstance(listed, dict):
        ids = (
            key for key in listed if not (key.isdecimal() and len(key) <= len(str(MAX_VOCAB)) and int(key) < MAX_VOCAB)
        )
        wrong = next(ids, None)
    if wrong is not None:
        found = f"added_tokens_decoder has {_shown(wrong)}"
        raise ConfigError(f"{path}: {found}, but must have tokens by their ids, below {MAX_VOCAB:,}")


def _check_ids(backend: tokenizers.Tokenizer, folder: Path) -> None:
    """Refuse a vocabulary of too many tokens, and added tokens whose ids lie far above it. Raises ConfigError."""
    from penstock.gpu_node.model.architecture.limits import MAX_VOCAB

    size, largest = backend.get_vocab_size(), max(backend.get_added_tokens_decoder(), default=0)
    if max(size, largest + 1) > MAX_VOCAB:
        found = f"{size:,} tokens and an added token with the id {largest}"
        raise ConfigError(f"no usable tokenizer in {folder}: it has {found}; ids must be below {MAX_VOCAB:,}")


def _add_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any], named: Mapping[str, _Token]) -> None:
    """Add tokens that the config adds or redefines, and special tokens that neither file lists."""
    listed = sorted((config.get("added_tokens_decoder") or {}).items(), key=lambda item: int(item[0]))
    if listed:
        backend.add_tokens([_added_token(token, "added_tokens_decoder") for _, token in listed])
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or ()
    further = [("extra_special_tokens", token) for token in extra] if isinstance(extra, list) else []
    special = [_added_token(token, field, special=True) for field, token in (*named.items(), *further)]
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    backend.add_special_tokens([token for token in special if token.content not in known])


def _named_tokens(config: Mapping[str, Any]) -> Iterator[tuple[str, _Token]]:
    """Yield `eos_token` and other named special tokens, as the config has them."""
    extra = config.get("extra_special_tokens")
    for name, token in (*config.items(), *(extra.items() if isinstance(extra, dict) else ())):
        is_token = isinstance(token, str) or (isinstance(token, dict) and "content" in token)
        if name.endswith("_token") and is_token:
            yield name, token
        elif name in _NAMED and token is not None:
            raise ConfigError(f"{name} is {_shown(token)} but must be a text or an object with its content")


def _added_token(token: _Token, field: str, **flags: bool) -> tokenizers.AddedToken:
    """Return a token from its text alone, or from its text and flags. field: of tokenizer_config.json, for an error."""
    try:
        if isinstance(token, str):
            return tokenizers.AddedToken(token, normalized=False, **flags)
        its = {flag: token[flag] for flag in _FLAGS if flag in token}
        return tokenizers.AddedToken(token["content"], **(its | flags))
    except (TypeError, KeyError, ValueError) as error:
        reason = reason_of(error)
        raise ConfigError(f"tokenizer_config.json: {field} has the token {_shown(token)}: {reason}") from error


def _shown(value: object) -> str:
    return repr(value)[:_SHOWN_CHARS]


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the templates by name: from files of their own, else from the config, as transformers does."""
    from penstock.gpu_node.model.architecture.limits import MAX_TEMPLATE_BYTES
    from penstock.gpu_node.model.checkpoint.json_object import read_template

    default, others = folder / "chat_template.jinja", sorted(folder.glob("additional_chat_templates/*.jinja"))
    paths = {"default": default} if default.is_file() else {}
    paths |= {path.stem: path for path in others}
    if paths:
        return {name: read_template(path) for name, path in paths.items()}
    found = config.get("chat_template")
    if found is None:
        # Processors write the template into a JSON file.
        found = _read_object(folder / "chat_template.json").get("chat_template")
    if isinstance(found, list):
        # An entry without a name or a template is of no use.
        entries = [entry for entry in found if isinstance(entry, dict) and {"name", "template"} <= entry.keys()]
        found = {str(entry["name"]): entry["template"] for entry in entries}
    if not isinstance(found, str | dict | None):
        raise ConfigError(f"{folder}/tokenizer_config.json: chat_template is {_shown(found)} but must be a text")
    named = found if isinstance(found, dict) else {"default": found}
    templates = {str(name): template for name, template in named.items() if isinstance(template, str)}
    if (most := max(map(len, templates.values()), default=0)) > MAX_TEMPLATE_BYTES:
        raise ConfigError(f"{folder}: a chat template has {most:,} characters; at most {MAX_TEMPLATE_BYTES:,} are read")
    return templates


def _read_object(path: Path) -> dict[str, Any]:
    from penstock.gpu_node.model.checkpoint.json_object import read_object

    return read_object(path) if path.is_file() else {}
