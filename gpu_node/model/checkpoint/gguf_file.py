"""An open GGUF file, whose header is read once."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from pathlib import Path

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.checkpoint.gguf_header import GgufHeader, read_header
from penstock.gpu_node.model.checkpoint.mapped_file import MappedFile


class GgufFile:
    """A GGUF file that is mapped."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError for an empty file."""
        self.path = path
        self.mapped = MappedFile(path)
        self._header: GgufHeader | None = None

    @property
    def header(self) -> GgufHeader:
        """The header without lists. Raises ConfigError that names the file, if it is truncated or invalid."""
        if self._header is None:
            self._header = self.header_with(())
        return self._header

    def header_with(self, lists: Container[str]) -> GgufHeader:
        """Return the header with some lists. Raises ConfigError as `header` does."""
        try:
            found = read_header(self.mapped.content.data, lists)
        except ConfigError as error:
            raise ConfigError(f"cannot read {self.path}: {error.message}") from error
        # A vocabulary takes many megabytes, so it is not kept.
        kept = {key: value for key, value in found.metadata.items() if key not in lists}
        self._header = replace(found, metadata=kept)
        return found
