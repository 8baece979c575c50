"""The folder in which the Redis of `penstock serve` keeps its jobs, and which servers may open it.

Redis 6.2 writes `appendonly.aof`. Redis 7 moves that file into a folder `appendonlydir`, which 6.2 does not know: it
would start empty, without an error. So the file `penstock-server.json` says which server used the folder last. It is
written before that server starts, because the server converts the files as its first act.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from penstock.contract.errors import ConfigError
from penstock.runtime.cache_folders import state_folder

_RECORD = "penstock-server.json"
_LOCK = "penstock.lock"
_FOLDER_OF_7 = "appendonlydir"
_VERSION = re.compile(r"(redis|valkey).*?\bv=(\d+)\.(\d+)", re.IGNORECASE)
_VERSION_TIMEOUT_S = 20.0
_LAST_SHARED = (7, 2)
"""Valkey began as a copy of Redis 7.2 and reads its files. Later versions of the two do not read each other's."""


def default_data_folder() -> Path:
    """Return the folder without `--data-dir`: $XDG_STATE_HOME/penstock/redis, else ~/.local/state/penstock/redis."""
    return state_folder() / "redis"


@dataclass(frozen=True, slots=True)
class ServerVersion:
    """A kind of server, `redis` or `valkey`, and its version without the patch level, which changes no file."""

    server: str
    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.server} {self.major}.{self.minor}"

    @classmethod
    def of(cls, binary: Path) -> Self:
        """Ask a server program for its version. Raises ConfigError if it does not tell."""
        try:
            command = [str(binary), "--version"]
            ran = subprocess.run(command, capture_output=True, text=True, timeout=_VERSION_TIMEOUT_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ConfigError(f"{binary} --version failed: {error}", param="redis_server") from error
        if (found := _VERSION.search(ran.stdout)) is None:
            said = ran.stdout.strip()[:100]
            raise ConfigError(f"{binary} --version names no Redis or Valkey: {said!r}", param="redis_server")
        return cls(found[1].lower(), int(found[2]), int(found[3]))

    def reads_files_of(self, other: ServerVersion) -> bool:
        """Return whether this server reads the append-only files that the other one wrote."""
        mine, theirs = (self.major, self.minor), (other.major, other.minor)
        if self.server == other.server:
            return mine >= theirs
        return self.server == "valkey" and theirs <= _LAST_SHARED


def lock_folder(data_dir: Path) -> int:
    """Return an open, locked file descriptor. Without the lock, two servers could corrupt one append-only file.

    Raises ConfigError if the folder is not writable or another server uses it.
    """
    try:
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(data_dir / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        problem = f"{error.filename}: {error.strerror}; --data-dir chooses another folder, --ephemeral needs none"
        raise ConfigError(problem, param="data_dir") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        problem = f"{data_dir} is in use by another penstock; --data-dir chooses another folder"
        raise ConfigError(problem, param="data_dir") from error
    return lock


def claim_for(data_dir: Path, binary: Path) -> None:
    """Record that a server is about to use the folder, which this process has locked.

    Raises ConfigError if the server would not read what another one left in the folder.
    """
    version = ServerVersion.of(binary)
    writer = _last_writer(data_dir)
    if writer is not None and not version.reads_files_of(writer):
        raise ConfigError(
            f"{data_dir} was written by {writer}, which {version} ({binary}) cannot read; set PENSTOCK_REDIS_SERVER "
            f"to {writer} or a later {writer.server}, or choose another folder with --data-dir",
            param="data_dir",
        )
    if writer == version and (data_dir / _RECORD).exists():
        return
    new = data_dir / f"{_RECORD}.new"
    try:
        with new.open("w", encoding="utf-8") as file:
            json.dump(asdict(version), file)
            file.flush()
            os.fsync(file.fileno())
        new.replace(data_dir / _RECORD)
        folder = os.open(data_dir, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise ConfigError(f"{error.filename or new}: {error.strerror}", param="data_dir") from error


def _last_writer(data_dir: Path) -> ServerVersion | None:
    """Return the server that used the folder last; None for a folder that any server may open."""
    path = data_dir / _RECORD
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return ServerVersion(str(found["server"]), int(found["major"]), int(found["minor"]))
    except FileNotFoundError:
        # A folder from before the record: only its layout tells.
        return ServerVersion("redis", 7, 0) if (data_dir / _FOLDER_OF_7).exists() else None
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"{path} is not readable ({error}); restore it, or choose another folder with --data-dir"
        raise ConfigError(problem, param="data_dir") from error
