"""The adapters that a node can serve: those named at start, and those in a shared folder, by subfolder name."""

from __future__ import annotations

import logging
import re
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from weakref import WeakValueDictionary

from penstock.contract.adapters import NAME_PATTERN, AdapterRef
from penstock.contract.errors import ConfigError, NotFoundError, RequestError
from penstock.gpu_node.model.architecture.spec import ModelSpec
from penstock.gpu_node.model.lora.adapter import CONFIG_FILE, WEIGHTS_FILE, LoraAdapter, digest_of, read_adapter

log = logging.getLogger(__package__)


_MAX_KEPT = 8
"""The number of most recently read adapters that stay in memory without a user."""
_Stamp = tuple[tuple[int, int], ...]
"""Size and modification time of an adapter's files; while it is unchanged, the digest is not recomputed."""


class AdapterLibrary:
    """Finds adapters by name and reads them; thread-safe."""

    def __init__(self, spec: ModelSpec, named: Mapping[str, Path], folder: Path | None, max_rank: int) -> None:
        """Read all adapters of `named`. Raises ConfigError if one is unusable or `folder` is not a folder."""
        self._spec = spec
        self._named = dict(named)
        self._folder = folder
        self._max_rank = max_rank
        self._digests: dict[Path, tuple[_Stamp, str]] = {}
        self._read: WeakValueDictionary[str, LoraAdapter] = WeakValueDictionary()
        self._kept: deque[LoraAdapter] = deque(maxlen=_MAX_KEPT)
        self._reported: dict[Path, str] = {}
        self._lock = threading.Lock()
        if folder is not None and not folder.is_dir():
            raise ConfigError(f"lora_dir {folder} is not a folder")
        for name, path in self._named.items():
            try:
                self._adapter(name, path)
            except ConfigError as error:
                raise ConfigError(f"lora {name}: {error.message}") from error

    def digests(self) -> dict[str, str]:
        """Return the current digest of each usable adapter by name."""
        found = {}
        with self._lock:
            for name, path in self._folders():
                try:
                    found[name] = self._digest(path)
                except (ConfigError, OSError) as error:
                    self._report_unusable(path, str(error))
        return found

    def find(self, wanted: AdapterRef) -> LoraAdapter:
        """Return the adapter with a name and, if given, a digest.

        Raises NotFoundError for an unknown name, and RequestError for an adapter that is unusable or has changed.
        """
        # Try without the lock first, because another thread may hold it while it reads a large adapter.
        if (known := self._read.get(wanted.digest)) is not None:
            return known
        with self._lock:
            folders = dict(self._folders())
            if wanted.name not in folders:
                names = ", ".join(sorted(folders)) or "none"
                message = f"adapter {wanted.name!r} is unknown; known adapters: {names}"
                raise NotFoundError(message, code="adapter_not_found", param="adapter")
            try:
                adapter = self._adapter(wanted.name, folders[wanted.name])
            except (ConfigError, OSError) as error:
                message = f"adapter {wanted.name!r} cannot be used: {error}"
                raise RequestError(message, code="adapter_unusable", param="adapter") from error
        if wanted.digest not in ("", adapter.digest):
            message = f"adapter {wanted.name!r} has changed since the job was submitted"
            raise RequestError(message, code="adapter_changed", param="adapter")
        return adapter

    def _adapter(self, name: str, folder: Path) -> LoraAdapter:
        digest = self._digest(folder)
        if (known := self._read.get(digest)) is not None:
            return known
        adapter = read_adapter(folder, name, digest, self._spec, self._max_rank)
        if self._digest(folder) != digest:
            raise ConfigError("the adapter's files changed while they were read")
        self._read[digest] = adapter
        self._kept.append(adapter)
        return adapter

    def _digest(self, folder: Path) -> str:
        files = ((folder / name).stat() for name in (CONFIG_FILE, WEIGHTS_FILE) if (folder / name).is_file())
        stamp = tuple((file.st_size, file.st_mtime_ns) for file in files)
        known = self._digests.get(folder)
        if known is None or known[0] != stamp:
            known = self._digests[folder] = stamp, digest_of(folder)
        return known[1]

    def _report_unusable(self, folder: Path, why: str) -> None:
        """Log an unusable adapter once per reason. It may be incomplete because it is still being copied."""
        if self._reported.get(folder) != why:
            self._reported[folder] = why
            log.warning("an adapter is left out", extra={"folder": str(folder), "reason": why})

    def _folders(self) -> Iterator[tuple[str, Path]]:
        """Yield the name and folder of each adapter; named adapters take precedence over the shared folder."""
        yield from self._named.items()
        try:
            paths = [] if self._folder is None else sorted(self._folder.iterdir())
        except OSError:
            paths = []  # the folder may be unmounted for a moment
        for path in paths:
            is_adapter_name = path.name not in self._named and re.fullmatch(NAME_PATTERN, path.name)
            if is_adapter_name and self._has_config(path):
                yield path.name, path

    def _has_config(self, folder: Path) -> bool:
        """Return whether a folder holds an adapter. This process may not be allowed to enter it."""
        try:
            return (folder / CONFIG_FILE).is_file()
        except OSError as error:
            self._report_unusable(folder, str(error))
            return False
