"""Read JSON objects from files of unknown origin."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.checkpoint.usable_file import require_usable


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file. Raises ConfigError if it is missing, unreadable or not an object."""
    if path.is_symlink() and not path.exists():
        require_usable(path)
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
