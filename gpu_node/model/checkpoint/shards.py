"""Find the weight files of a sharded checkpoint."""

from __future__ import annotations

from pathlib import Path

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.checkpoint.json_object import read_object

INDEX = "model.safetensors.index.json"


def shards_of(folder: Path) -> list[str] | None:
    """Return the sorted names of the files in a folder's index; None if there is no index.

    Raises ConfigError for an index that cannot be read or names no files.
    """
    path = folder / INDEX
    if not path.is_file():
        return None
    files = read_object(path).get("weight_map")
    if not isinstance(files, dict) or not files or not all(isinstance(name, str) for name in files.values()):
        raise ConfigError(f"{path} has no weight_map that says which tensors are in which files")
    return sorted(set(files.values()))
