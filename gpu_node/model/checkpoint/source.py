"""Resolve a model name to local files: a folder in Hugging Face's format, with the weights there or in a GGUF file."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.checkpoint.conversion_cache import built_once, samples
from penstock.gpu_node.model.checkpoint.gguf_conversion import describe_gguf
from penstock.gpu_node.model.checkpoint.gguf_file import GgufFile, starts_as_gguf
from penstock.gpu_node.model.checkpoint.hub import HubModel, downloaded, family_in
from penstock.gpu_node.model.checkpoint.json_object import read_object
from penstock.gpu_node.model.checkpoint.usable_file import require_usable, require_usable_descriptions
from penstock.gpu_node.model.checkpoint.weight_files import gguf_of, gguf_parts, is_gguf
from penstock.gpu_node.model.protocol import WrittenTokenizer
from penstock.runtime.cache_folders import file_stem

_CONVERTER_VERSION = 9
"""Increased when the converters' output changes, so that no node uses outdated cached files."""

ADAPTER_CONFIG = "adapter_config.json"

_PIECE = re.compile(r"(.+\.gguf)([.-](?:part|split)[-_]?)[a-z0-9]+", re.IGNORECASE)
"""A file that was cut by bytes, for a limit on the size of files; it is not a part of a split model."""

Progress = Callable[[str, float], None]
"""Receives a loading stage and the fraction of it that is done, 0 to 1."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The local files of a model."""

    folder: Path
    """The folder of config.json and the tokenizer's files, and of the weights unless they are in `gguf`."""
    gguf: Path | None = None
    """The first part, if it is split."""
    is_dummy: bool = False
    """Whether the weights are random and no file has them."""


@dataclass(frozen=True, slots=True)
class OpenModel:
    """The files of a model, and what this process has already read of them."""

    source: ModelSource
    gguf: GgufFile | None = None
    """The source's GGUF file."""
    tokenizer: WrittenTokenizer | None = None
    """The tokenizer of the folder, if this process has just written it."""


def resolve_model(model: str, progress: Progress, revision: str | None = None) -> ModelSource:
    """Return the files of a model, as `open_model` does."""
    return open_model(model, progress, revision).source


def open_model(
    model: str, progress: Progress, revision: str | None = None, check: Callable[[Path], None] = family_in
) -> OpenModel:
    """Open the files of a model given as a folder, a `.gguf` file or a name on the hub (`HubModel`).

    A folder may have one GGUF model instead of safetensors; a split one is given by any of its parts. The config and
    tokenizer of a GGUF file are converted once into the cache folder. Raises ConfigError if there is no
    such model. check: called with the folder of a config.json before weights are downloaded.
    """
    path = local_path(model)
    if path is None:
        path = downloaded(HubModel.parse(model, revision), lambda fraction: progress("download", fraction), check)
    elif revision is not None:
        raise ConfigError(f"revision {revision} is only for models of the hub, but {model} is a path")
    if path.is_dir():
        if (gguf := gguf_of(path)) is not None:
            return _open_gguf(gguf, progress)
        require_usable_descriptions(path)
        if (path / ADAPTER_CONFIG).is_file() and not (path / "config.json").is_file():
            base = read_object(path / ADAPTER_CONFIG).get("base_model_name_or_path")
            raise ConfigError(f"{path} is a LoRA adapter of {base}, not a model: serve that with --lora NAME={path}")
        return OpenModel(ModelSource(path))
    check_gguf(path)
    return _open_gguf(path, progress)


def local_path(model: str) -> Path | None:
    """Return the path that a model's name is; None for a name on the hub."""
    path = Path(model).expanduser()
    is_local = (
        path.exists() or path.is_symlink() or model.startswith((".", "/", "~")) or (is_gguf(model) and ":" not in model)
    )
    return path if is_local else None


def check_gguf(path: Path) -> None:
    """Raise ConfigError for what is no GGUF file, whatever its name is: those in the store of Ollama have no ending."""
    if path.is_symlink():
        require_usable(path)
    if not is_gguf(path.name) and not path.is_file():
        raise ConfigError(f"there is no folder {path}")
    if not path.is_file():
        raise ConfigError(f"there is no file {path}")
    if (piece := _PIECE.fullmatch(path.name)) is not None:
        join = f"cat {piece[1]}{piece[2]}* > {piece[1]}"
        raise ConfigError(f"{path} is a piece of a GGUF file, cut by bytes; join the pieces: {join}")
    if not is_gguf(path.name) and not starts_as_gguf(path):
        raise ConfigError(f"{path} is neither a folder nor a GGUF file")


def _open_gguf(path: Path, progress: Progress) -> OpenModel:
    file, written = GgufFile(path), []

    def convert(folder: Path) -> None:
        # The weights of a new file will all be read. Its pages are mapped while this thread converts the tokenizer.
        for part in file.parts:
            part.page_faults.take_ahead()
        written.append(describe_gguf(file, folder, progress))

    folder = built_once(_cached_name(path), convert)
    return OpenModel(ModelSource(folder, file.path), file, written[0] if written else None)


def _cached_name(gguf: Path) -> str:
    """Return the cache name of a GGUF file from the modification times and samples of its parts.

    Reading all of a large file would take as long as loading it.
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in gguf_parts(gguf):
        digest.update(str(part.stat().st_mtime_ns).encode())
        for sample in samples(part):
            digest.update(sample)
    return f"{file_stem(gguf.stem)}-{digest.hexdigest()}-v{_CONVERTER_VERSION}"
