"""From what the user calls a model to a local folder in Hugging Face's format."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.gguf import convert_gguf

_HUB_FILES = ["*.safetensors", "*.json", "tokenizer*", "*.jinja", "*.model"]
_NOT_WEIGHTS = ["original/*", "onnx/*", "metal/*"]
_CONVERTER_VERSION = 1
"""Goes up when `convert_gguf` writes other files than before, so that no node goes on with the older ones."""
_BUILDING_S = 24 * 60 * 60
"""A conversion older than this is not under way: its process died."""


def resolve_model(model: str, progress: Callable[[str, float], None]) -> Path:
    """The folder of a model given as a folder, a `.gguf` file or a hub id with optional `@revision`.

    A GGUF file is converted once per content into the cache folder. Raises ConfigError when there is no such model.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if model.endswith(".gguf"):
        if not path.is_file():
            raise ConfigError(f"there is no file {path}")
        return _converted(path, progress)
    if model.startswith((".", "/", "~")):
        raise ConfigError(f"there is no folder {path}")
    return _downloaded(model, progress)


def cache_folder() -> Path:
    """Where converted models are kept: $PENSTOCK_CACHE, else ~/.cache/penstock."""
    return Path(os.environ.get("PENSTOCK_CACHE") or "~/.cache/penstock").expanduser()


def _converted(gguf: Path, progress: Callable[[str, float], None]) -> Path:
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=8)).hexdigest()
    folder = cache_folder() / "models" / f"{gguf.stem}-{digest}-v{_CONVERTER_VERSION}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    _sweep(folder.parent, time.time() - _BUILDING_S)
    # Built beside its place and moved there whole: two processes may race, and either may die half way.
    with tempfile.TemporaryDirectory(prefix=f".{gguf.stem}-", dir=folder.parent) as building:
        converted = Path(building) / "model"
        convert_gguf(gguf, converted, progress)
        try:
            converted.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
            shutil.rmtree(converted)
    return folder


def _sweep(models: Path, before_s: float) -> None:
    """Remove what conversions that died before a time left half built."""
    for left in models.glob(".*"):
        # Another process may sweep, or finish, at the same time.
        with suppress(OSError):
            if left.stat().st_mtime < before_s:
                shutil.rmtree(left)


def _downloaded(model: str, progress: Callable[[str, float], None]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    repo_id, _, revision = model.partition("@")
    progress("download", 0.0)
    try:
        folder = snapshot_download(
            repo_id, revision=revision or None, allow_patterns=_HUB_FILES, ignore_patterns=_NOT_WEIGHTS
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(f"cannot get model {model} from the hub: {error}") from error
    progress("download", 1.0)
    return Path(folder)
