"""Read JSON files of unknown origin: objects, and the index of a sharded checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock.contract.errors import ConfigError

INDEX = "model.safetensors.index.json"


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file. Raises ConfigError if it is missing, unreadable or not an object."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ConfigError(f"there is no {path}") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{path} is nested too deeply") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return content


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
