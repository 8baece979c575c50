"""The boundary around files that others have written: what reading them raises becomes a sentence with the file."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.contract.errors import ConfigError, PenstockError

log = logging.getLogger(__package__)

_PANIC = "PanicException"
"""What a panic of a library in Rust is in Python. It is no Exception, and no module exports it."""
_MAX_REASON_CHARS, _MAX_MESSAGE_CHARS = 300, 1200
_FILE = re.compile(r"\.(json|jinja|gguf|safetensors|txt)\b")
"""What a message that names a file has."""


def is_of_content(error: BaseException) -> bool:
    """Return whether a library may raise this error because of what it reads."""
    return type(error).__name__ == _PANIC or (
        isinstance(error, Exception) and not isinstance(error, ImportError | PenstockError)
    )


def reason_of(error: BaseException) -> str:
    """Return in one line what an error of a library says."""
    said = f"there is no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
    return _shortened(said, _MAX_REASON_CHARS) or type(error).__name__


def _shortened(text: str, max_chars: int) -> str:
    """Return a text without its middle, if it is too long: a parser says at the end where the problem is."""
    return text if len(text) <= max_chars else f"{text[: max_chars * 2 // 3]}…{text[-max_chars // 3 :]}"


@contextmanager
def reading(path: Path, model: str = "") -> Iterator[None]:
    """Translate what the content of a file of a model raises in the block.

    model: as its user names it; by default the file's folder. A ConfigError that names neither a path nor a setting
    names the model and the file then. Whatever else a library raises becomes a ConfigError, and its cause is in the
    log at level debug: `cannot load MODEL: WHAT in FILE`. Only reading belongs in the block, because an error of
    computing is a bug.
    """
    try:
        yield
    except ConfigError as error:
        # A value of a file may be of any length.
        said = _shortened(error.message, _MAX_MESSAGE_CHARS)
        if error.param is None and "/" not in said and str(path) not in said:
            said = _sentence(said, path, model)
        if said == error.message:
            raise
        raise ConfigError(said, code=error.code, param=error.param) from error
    except BaseException as error:
        if not is_of_content(error):
            raise
        log.debug("a file of a model cannot be read", extra={"file": str(path)}, exc_info=error)
        raise ConfigError(_sentence(reason_of(error), path, model)) from error


def _sentence(what: str, path: Path, model: str) -> str:
    what, separator, remedy = what.partition(";")
    model = model or str(path.parent)
    file = path.name if str(path.parent) == model else path
    place = "" if str(path) == model or _FILE.search(what) else f" in {file}"
    return f"cannot load {model}: {what}{place}{separator}{remedy}"
