"""Read JSON objects from files of unknown origin."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.architecture.limits import MAX_DESCRIPTION_BYTES, MAX_TEMPLATE_BYTES
from penstock.gpu_node.model.checkpoint.usable_file import require_usable


def read_object(path: Path, *, max_bytes: int = MAX_DESCRIPTION_BYTES) -> dict[str, Any]:
    """Read a JSON object from a file. Raises ConfigError if it is missing, unreadable, too large or not an object."""
    is_gone = path.is_symlink() and not path.exists()
    # To open a pipe waits for a writer.
    if is_gone or (path.exists() and not path.is_file() and not path.is_dir()):
        require_usable(path)
    try:
        content = json.loads(read_within(path, max_bytes))
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


def read_within(path: Path, max_bytes: int) -> bytes:
    """Return the content of a file. Raises ConfigError if it is larger, and OSError."""
    with path.open("rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ConfigError(f"{path} has more than {max_bytes:,} bytes, the most that such a file may have")
    return content


def read_template(path: Path) -> str:
    """Return a chat template's text. Raises ConfigError for a file that is too large, unreadable or not UTF-8."""
    try:
        text = read_within(path, MAX_TEMPLATE_BYTES).decode()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error}") from error
    return text.replace("\r\n", "\n").replace("\r", "\n")
