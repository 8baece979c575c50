"""Which files of a folder have a model's weights, and the parts of a split GGUF file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.architecture.limits import MAX_INDEX_BYTES, MAX_PARTS
from penstock.gpu_node.model.checkpoint.json_object import read_object
from penstock.gpu_node.model.checkpoint.usable_file import require_usable

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"(.+)-(\d+)-of-(\d+)\.safetensors")
_OTHERS = ("adapter_model.safetensors", "consolidated*.safetensors")
"""Files beside a model's: an adapter's, and the same weights under Mistral's own names."""
_PART = re.compile(r"(.+-)\d{5}(-of-(\d{5})\.gguf)", re.IGNORECASE)
_MAX_LISTED = 10
"""Names of missing files in an error."""
_PROJECTOR = re.compile(r"(^|[-_.])mmproj", re.IGNORECASE)
"""The image encoder of a model, in a GGUF file of its own."""


def safetensors_files(folder: Path) -> list[Path]:
    """Return a folder's weight files. Raises ConfigError if files are missing or the weights are pickled.

    Like transformers it takes model.safetensors if there is one, whatever an index says, else the files of the index.
    """
    single, index = folder / SINGLE, folder / INDEX
    if single.is_file() or single.is_symlink():
        files = [single]
    elif index.is_file():
        files = [folder / name for name in sorted(set(weight_map(folder).values()))]
        missing = [path.name for path in files if not path.is_file() and not path.is_symlink()]
        if missing:
            raise ConfigError(f"{index} names files that are not there: {_listed(missing)}")
    else:
        files = _unlisted(folder)
    for path in files:
        require_usable(path)
    return files


def weight_map(folder: Path) -> dict[str, str]:
    """Return the file of each tensor by the folder's index; empty if the index does not count.

    Raises ConfigError for an index that cannot be read or names no files.
    """
    path = folder / INDEX
    if not path.is_file() or (folder / SINGLE).is_file():
        return {}
    return index_of(path)


def index_of(path: Path) -> dict[str, str]:
    """Return the content of an index. Raises ConfigError for one that cannot be read or names no files."""
    files = read_object(path, max_bytes=MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise ConfigError(f"{path} has no weight_map that says which tensors are in which files")
    for tensor, name in files.items():
        # The files themselves may be links, as in the cache of the hub.
        if not isinstance(name, str) or name in ("", "..") or Path(name).name != name:
            found = f"weight_map has {str(name)[:200]!r} for {tensor[:200]}"
            raise ConfigError(f"{path}: {found}; it must be the name of a file beside it")
    return files


def _unlisted(folder: Path) -> list[Path]:
    """Return the weight files of a folder that has neither model.safetensors nor an index."""
    found = sorted(folder.glob("*.safetensors"))
    files = [path for path in found if not any(path.match(pattern) for pattern in _OTHERS)] or found
    shards = {path.name: match for path in files if (match := _SHARD.fullmatch(path.name))}
    sets = {(match[1], int(match[3])) for match in shards.values()}
    if len(sets) > 1:
        names = ", ".join(sorted(f"{stem}-*-of-{count}" for stem, count in sets))
        raise ConfigError(f"{folder} has shards of several checkpoints and no {INDEX}: {names}; remove the old ones")
    for stem, count in sets:
        _check_count(count, folder / f"{stem}-*-of-*.safetensors")
        digits = {int(match[2]) for match in shards.values()}
        missing = [f"{stem}-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1) if i not in digits]
        if missing:
            raise ConfigError(f"{folder} lacks shards of its checkpoint: {_listed(missing)}")
        return [folder / name for name in shards]
    if not files and (any(folder.glob("*.bin")) or any(folder.glob("*.pt*"))):
        raise ConfigError(f"{folder} has only pickled weights, which can run code; use .safetensors or .gguf")
    if not files:
        raise ConfigError(f"{folder} has no .safetensors weights")
    return files


def _check_count(count: int, name: object) -> None:
    if count > MAX_PARTS:
        raise ConfigError(f"{name} is named as one of {count:,} files; a checkpoint has at most {MAX_PARTS:,}")


def _listed(names: list[str]) -> str:
    more = len(names) - _MAX_LISTED
    return ", ".join(names[:_MAX_LISTED]) + (f" and {more} more" if more > 0 else "")


def is_gguf(name: str) -> bool:
    """Return whether a name is that of a GGUF file. Some are in capitals."""
    return name.lower().endswith(".gguf")


def gguf_names(name: str) -> list[str]:
    """Return the names of all parts of the GGUF file that one part's name tells; the name alone if it is not split."""
    match = _PART.fullmatch(name)
    if match is None:
        return [name]
    _check_count(int(match[3]), name)
    return [f"{match[1]}{i:05}{match[2]}" for i in range(1, int(match[3]) + 1)]


def gguf_parts(path: Path) -> list[Path]:
    """Return all parts of a GGUF file, given by any of them. Raises ConfigError that names missing parts."""
    parts = [path.with_name(name) for name in gguf_names(path.name)]
    missing = [part.name for part in parts if not part.is_file() and not part.is_symlink()]
    if missing and len(parts) > 1:
        raise ConfigError(f"{path} is one of {len(parts)} parts of a model; missing: {_listed(missing)}")
    for part in parts:
        require_usable(part)
    return parts


def gguf_of(folder: Path) -> Path | None:
    """Return the GGUF file of a folder without safetensors, or its first part; None if there is none.

    Raises ConfigError if the folder has several models.
    """
    if any(folder.glob("*.safetensors")) or (folder / INDEX).is_file():
        return None
    names = _models_of(path.name for path in folder.iterdir() if is_gguf(path.name))
    if len(names) > 1:
        listed = ", ".join(sorted(names))
        raise ConfigError(f"{folder} has several models; name the file of one: {listed}")
    return folder / names.popitem()[1] if names else None


def _models_of(names: Iterable[str]) -> dict[str, str]:
    """Return the first part of each model by its own name, or by that of its parts without their numbers."""
    found: dict[str, str] = {}
    for name in sorted(names):
        if not _PROJECTOR.search(name):
            found.setdefault(gguf_names(name)[0], name)
    return found


def first_parts(names: Mapping[str, int] | Iterable[str]) -> list[str]:
    """Return the GGUF files among some names, of each split one only the first part."""
    return sorted(_models_of(name for name in names if is_gguf(name)).values())
