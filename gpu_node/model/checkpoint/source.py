"""From what the user calls a model to local files: a folder in Hugging Face's format, or one beside a GGUF file."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.checkpoint.conversion_cache import built_once, samples
from penstock.gpu_node.model.checkpoint.gguf import describe_gguf
from penstock.gpu_node.model.checkpoint.hub import HubModel, downloaded

_CONVERTER_VERSION = 2
"""Goes up when the converters write other files than before, so that no node goes on with the older ones."""

Progress = Callable[[str, float], None]
"""Hears a stage and the fraction of it that is done."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model's files are."""

    folder: Path
    """Holds config.json and the tokenizer's files; the weights too, unless they are in `gguf`."""
    gguf: Path | None = None


def resolve_model(model: str, progress: Progress, revision: str | None = None) -> ModelSource:
    """The files of a model given as a folder, a `.gguf` file or a name of the hub (`HubModel`).

    What a GGUF file says of config and tokenizer is written to the cache folder once. Raises ConfigError when there is
    no such model.
    """
    path = Path(model).expanduser()
    is_local = path.exists() or model.startswith((".", "/", "~")) or (model.endswith(".gguf") and ":" not in model)
    if not is_local:
        path = downloaded(HubModel.parse(model, revision), lambda fraction: progress("download", fraction))
    elif revision is not None:
        raise ConfigError(f"revision {revision} is for models of the hub, {model} is a path")
    if path.is_dir():
        return ModelSource(path)
    if path.suffix != ".gguf":
        raise ConfigError(f"there is no folder {path}")
    if not path.is_file():
        raise ConfigError(f"there is no file {path}")
    return ModelSource(built_once(_cached_name(path), lambda folder: describe_gguf(path, folder, progress)), path)


def _cached_name(gguf: Path) -> str:
    """Names a file by time of change and samples: reading all of a large one would take as long as loading it."""
    digest = hashlib.blake2b(str(gguf.stat().st_mtime_ns).encode(), digest_size=8)
    for sample in samples(gguf):
        digest.update(sample)
    return f"{gguf.stem}-{digest.hexdigest()}-v{_CONVERTER_VERSION}"
