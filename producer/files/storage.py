"""The contents of stored files: objects in a folder, or behind an fsspec URL such as s3://, and the settings of both.

All gateways of a Redis need the same settings, which come from PENSTOCK_FILES_* variables.

All methods block, so callers use a thread. An object is there as a whole or not at all, and never changes.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from penstock.contract.errors import BusyError, ConfigError, NotFoundError, PenstockError, UnavailableError
from penstock.queue.files.file_records import FileLimits
from penstock.runtime.cache_folders import flush_entry
from penstock.runtime.settings import Settings

DAY_S = 86_400


class FilesSettings(Settings):
    """Where files are stored, how many, and for how long."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_FILES_")

    url: str | None = None
    """Folder, or fsspec URL such as s3://bucket/penstock, that all gateways and workers reach. Default: none; with
    `penstock serve` a folder beside its queue."""
    max_file_mib: int = Field(default=200, ge=1, le=10_240)
    """Largest file in MiB."""
    max_tenant_mib: int = Field(default=10_240, ge=0)
    """Most MiB of all files of a tenant. 0: no limit."""
    max_mib: int = Field(default=102_400, ge=0)
    """Most MiB of all files. 0: no limit."""
    max_tenant_files: int = Field(default=10_000, ge=0)
    """Most files of a tenant. 0: no limit."""
    max_files: int = Field(default=100_000, ge=0)
    """Most files of all tenants. 0: no limit."""
    min_free_mib: int = Field(default=1024, ge=0)
    """MiB that must stay free on the disk of a folder. An upload that would take them is refused."""
    retention_days: float = Field(default=30.0, gt=0, le=3650)
    """Days for which a file is kept if its upload names no `expires_after`, and a batch after its end."""
    min_upload_kib_per_s: float = Field(default=16.0, gt=0)
    """Slowest upload in KiB per second, beyond the first 30 s."""
    max_tenant_uploads: int = Field(default=4, ge=1)
    """Most uploads of a tenant that one gateway receives at once. It receives four times as many in all."""

    max_tenant_batches: int = Field(default=100, ge=0)
    """Most open batches of a tenant. 0: no limit."""
    max_tenant_rows: int = Field(default=2_000_000, ge=0)
    """Most rows of a tenant's open batches that are not answered yet. A further batch waits. 0: no limit."""
    max_batch_rows: int = Field(default=50_000, ge=1)
    """Most rows of a batch."""
    max_batch_inputs: int = Field(default=50_000, ge=1)
    """Most texts of all rows of a batch of embeddings."""

    max_message_batch_rows: int = Field(default=100_000, ge=1)
    """Most requests of a message batch."""
    max_message_batch_mib: int = Field(default=256, ge=1, le=4096)
    """Largest body of a message batch in MiB."""
    message_batch_days: float = Field(default=29.0, gt=0, le=3650)
    """Days after the creation of a message batch for which its results are kept."""

    batch_lease_s: float = Field(default=6.0, ge=1, le=60)
    """Seconds after which another process goes on with a batch whose process is silent."""

    @property
    def max_file_bytes(self) -> int:
        """Largest file in bytes."""
        return self.max_file_mib << 20

    @property
    def retention_ms(self) -> int:
        """Milliseconds for which a file is kept by default."""
        return int(self.retention_days * DAY_S * 1000)

    @property
    def limits(self) -> FileLimits:
        """The limits that hold over all gateways."""
        return FileLimits(self.max_tenant_mib << 20, self.max_mib << 20, self.max_tenant_files, self.max_files)


_LOG = logging.getLogger(__package__)
BLOCK_BYTES = 1 << 20
"""Bytes that are read or written at once."""
_MARK = "penstock-storage"
"""Object that each storage has. A folder that is not mounted does not show it."""
PARTIAL = ".partial"
_RETRY_MS = 5_000
_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def storage_errors() -> Iterator[None]:
    """Translate what a file system or a client of an object store raises.

    A missing object raises NotFoundError, a full disk BusyError, and all else UnavailableError: stores have errors of
    many packages, and whatever it is, the caller may try again.
    """
    try:
        yield
    except PenstockError:
        raise
    except FileNotFoundError as error:
        raise NotFoundError(f"the storage has no object {error.filename or error}", code="no_object") from None
    except OSError as error:
        if error.errno in _FULL:
            raise BusyError("the storage of files is full", code="file_storage_full", retry_after_ms=60_000) from None
        raise _unreachable(error) from error
    except Exception as error:
        raise _unreachable(error) from error


def _unreachable(error: Exception) -> UnavailableError:
    message = f"the storage of files is unreachable: {str(error)[:200] or type(error).__name__}"
    return UnavailableError(message, code="files_unavailable", retry_after_ms=_RETRY_MS)


class Listed(NamedTuple):
    """An object in a listing."""

    num_bytes: int
    modified_s: float
    """Unix time of its last change; now if the store does not say."""


class ObjectWriter(Protocol):
    """A new object while it is written."""

    def write(self, data: bytes) -> None:
        """Append bytes."""

    def commit(self) -> None:
        """Let the object exist."""

    def discard(self) -> None:
        """Let it not exist."""


class _FileWriter:
    """A file of a folder. Its content is on disk before it has its name."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._partial = path.with_name(path.name + PARTIAL)
        with storage_errors():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = open(self._partial, "wb", opener=lambda name, flags: os.open(name, flags, 0o600))  # noqa: SIM115

    def write(self, data: bytes) -> None:
        with storage_errors():
            self._file.write(data)

    def commit(self) -> None:
        with storage_errors():
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            os.replace(self._partial, self._path)
            flush_entry(self._path.parent)

    def discard(self) -> None:
        with suppress(OSError):
            self._file.close()
        with storage_errors():
            self._partial.unlink(missing_ok=True)


class ObjectLines:
    """The lines of an object. Errors of the storage are translated."""

    def __init__(self, source: IO[bytes]) -> None:
        self._source = source

    def readline(self, limit: int = -1, /) -> bytes:
        """Return the next line, or its first `limit` bytes; nothing at the end."""
        with storage_errors():
            return self._source.readline(limit)

    def close(self) -> None:
        """Close the object."""
        self._source.close()


class _StoreWriter:
    """An object of a store. It appears when its upload is complete."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: bytes) -> None:
        with storage_errors():
            self._file.write(data)

    def commit(self) -> None:
        with storage_errors():
            self._file.close()

    def discard(self) -> None:
        # Marked as closed, or the garbage collector would complete the object.
        try:
            with storage_errors():
                self._file.discard()
        finally:
            self._file.closed = True


class Storage:
    """Objects below a folder or an fsspec URL. Raises the errors of `storage_errors`, and ConfigError at first."""

    def __init__(self, url: str) -> None:
        """Raises ConfigError if no package knows the URL."""
        self.url = url
        try:
            from fsspec.core import url_to_fs

            self._fs, self._root = url_to_fs(url)
        except ModuleNotFoundError as error:
            message = f"PENSTOCK_FILES_URL: {error.name} is not installed, which {url.partition('://')[0]} needs"
            raise ConfigError(message, param="url") from None
        except (ImportError, ValueError, OSError) as error:
            raise ConfigError(f"PENSTOCK_FILES_URL: {error}", param="url") from None
        protocol = self._fs.protocol
        self._is_folder = "file" in ((protocol,) if isinstance(protocol, str) else protocol)
        self._storage_id = ""

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{self._storage_id}/{name}"

    def choose(self, storage_id: str) -> None:
        """Use the storage with this id. Several may be behind one URL, such as those of several Redis.

        Raises UnavailableError if it is not there.
        """
        self._storage_id = storage_id
        with storage_errors():
            # Listings of a store may be cached by its client.
            self._fs.invalidate_cache()
            if not self._fs.exists(self._path(_MARK)):
                raise UnavailableError(
                    "PENSTOCK_FILES_URL does not show the storage that has the files of this Redis: all gateways and "
                    "workers must see the same folder or bucket",
                    code="other_file_storage",
                    retry_after_ms=60_000,
                )

    def create(self) -> str:
        """Make a new storage behind the URL, and return its id."""
        self._storage_id = uuid.uuid4().hex
        mark = self.writer(_MARK)
        mark.write(self._storage_id.encode())
        mark.commit()
        return self._storage_id

    def writer(self, name: str) -> ObjectWriter:
        """Begin a new object."""
        if self._is_folder:
            return _FileWriter(Path(self._path(name)))
        with storage_errors():
            return _StoreWriter(self._fs.open(self._path(name), "wb"))

    def reader(self, name: str) -> IO[bytes]:
        """Open an object for reading. Its methods raise errors that only `storage_errors` translates."""
        with storage_errors():
            if self._is_folder:
                return open(self._path(name), "rb")
            # A store's own file has no lines of a bounded length.
            return io.BufferedReader(self._fs.open(self._path(name), "rb"), BLOCK_BYTES)

    def lines(self, name: str) -> ObjectLines:
        """Open an object for reading line by line."""
        return ObjectLines(self.reader(name))

    def append_to(self, writer: ObjectWriter, name: str) -> int:
        """Copy a whole object to the end of a new one. Return the number of its bytes."""
        num_bytes = 0
        with storage_errors(), self.reader(name) as source:
            while block := source.read(BLOCK_BYTES):
                writer.write(block)
                num_bytes += len(block)
        return num_bytes

    def delete(self, name: str) -> None:
        """Delete an object, or a folder whose name ends with `/`, if it is there."""
        with storage_errors(), suppress(FileNotFoundError):
            path = self._path(name)
            if name.endswith("/"):
                self._fs.invalidate_cache()
                if self._fs.exists(path.rstrip("/")):
                    self._fs.rm(path.rstrip("/"), recursive=True)
                return
            if self._is_folder:
                Path(path + PARTIAL).unlink(missing_ok=True)
            self._fs.rm_file(path)

    def exists(self, name: str) -> bool:
        """Return whether there is an object of this name."""
        with storage_errors():
            self._fs.invalidate_cache()
            return bool(self._fs.exists(self._path(name)))

    def free_bytes(self) -> int | None:
        """Return the free bytes of a folder's disk; None for a store."""
        if not self._is_folder:
            return None
        with storage_errors():
            return shutil.disk_usage(self._root).free

    def listing(self, folder: str) -> dict[str, Listed]:
        """Return the objects in a folder and the folders in it, by name without the folder.

        Unfinished objects of a folder on a disk are among them, with `.partial` at the end of their names.
        """
        with storage_errors():
            self._fs.invalidate_cache()
            path = self._path(folder)
            try:
                found = self._fs.find(path, detail=True)
            except FileNotFoundError:
                return {}
            begin = f"{path}/"
            return {name.removeprefix(begin): Listed(one["size"], _modified_s(one)) for name, one in found.items()}

    def older_names(self, folder: str, age_s: float) -> list[str]:
        """Return the names in a folder, without the folder, of objects that are older than so many seconds."""
        found = self.older(self.listing(folder), age_s)
        return sorted({name.removesuffix(PARTIAL) for name in found})

    def older(self, listed: Mapping[str, Listed], age_s: float) -> dict[str, Listed]:
        """Return those objects of a listing that are older than so many seconds.

        The times of objects are those of the storage. So an object counts only if it is old by the storage's clock too.
        """
        found = {name: one for name, one in listed.items() if time.time() - one.modified_s > age_s}
        if found:
            now_s = self._clock_s()
            found = {name: one for name, one in found.items() if now_s - one.modified_s > age_s}
        return found

    def _clock_s(self) -> float:
        """Return the storage's time: that of an object written now."""
        name = f"clock-{uuid.uuid4().hex}"
        probe = self.writer(name)
        probe.write(b"now")
        probe.commit()
        try:
            with storage_errors():
                return _modified_s(self._fs.info(self._path(name)))
        finally:
            self.delete(name)


def _modified_s(entry: dict[str, Any]) -> float:
    """Return when an entry of a listing changed; now if the store does not say."""
    modified = entry.get("mtime", entry.get("LastModified", entry.get("created")))
    if isinstance(modified, int | float):
        return float(modified)
    return float(modified.timestamp()) if isinstance(modified, datetime) else time.time()
