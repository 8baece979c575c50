"""Files of a model that look right but have no content: links to nothing, and pointers of Git LFS."""

from __future__ import annotations

from pathlib import Path

from penstock.contract.errors import ConfigError

_POINTER = b"version https://git-lfs.github.com/spec/"
_MAX_POINTER_BYTES = 1024
_DESCRIPTIONS = ("*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt", "additional_chat_templates/*.jinja")


def require_usable(path: Path) -> None:
    """Raise ConfigError for a link to nothing, a folder, a pointer of Git LFS, or a file that cannot be read."""
    if path.is_symlink() and not path.exists():
        raise ConfigError(f"{path} is a link to {path.readlink()}, which is not there")
    if path.is_dir():
        raise ConfigError(f"{path} is a folder, not a file")
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} is a device or a pipe, not a file")
    try:
        with path.open("rb") as file:
            start = file.read(len(_POINTER))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    if start == _POINTER and path.stat().st_size <= _MAX_POINTER_BYTES:
        raise ConfigError(f"{path} is a pointer of Git LFS, not the file itself; `git lfs pull` downloads the file")


def require_usable_descriptions(folder: Path) -> None:
    """Raise ConfigError as `require_usable` does, for the files that describe a model beside its weights."""
    for pattern in _DESCRIPTIONS:
        for path in sorted(folder.glob(pattern)):
            if not path.is_dir():
                require_usable(path)
