"""The Redis of this user's `penstock serve`: one fixed address, which clients and commands find by themselves.

A client or a command uses, in this order:

1. the URL that it is given, by `--redis-url` or `Client(url)`;
2. `PENSTOCK_REDIS_URL`;
3. the Redis that this user's `penstock serve` runs, at `unix:///tmp/penstock-UID/redis.sock`. While only a
   `penstock serve --ephemeral` runs, that is a link to its Redis.

It tries nothing else. Port 6379, for example, is open to every user of the machine.

The folder has mode 0700 and must belong to this user, or it is refused: otherwise another user could read the prompts.
It is the same in each session. XDG_RUNTIME_DIR would not be: cron and many SSH sessions do not set it, and the system
removes that folder when the user logs out. PENSTOCK_RUNTIME_DIR selects another folder.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from penstock.contract.errors import ConfigError

SOCKET = "redis.sock"
_GATEWAY = "gateway.url"
_MAX_SOCKET_PATH = 100
"""Linux limits a socket's path to 108 bytes with the closing zero; other systems to 104."""
_LOCK = "serve.lock"
_FILES = "files.url"
_LOCK_FLAGS = os.O_RDWR | os.O_CREAT
_CONNECT_TIMEOUT_S = 1.0
_POLL_S = 0.05
_TAKE_TIMEOUT_S = 20.0
"""Seconds to wait for an earlier Redis that is starting or ending."""


def local_folder(given: Path | None) -> Path:
    """Return the folder of the socket: `given` (PENSTOCK_RUNTIME_DIR), else /tmp/penstock-UID."""
    return given.expanduser().absolute() if given is not None else Path(f"/tmp/penstock-{os.getuid()}")


def fits_socket(folder: Path) -> bool:
    """Return whether the path of a socket in `folder` is short enough for the system."""
    return len(os.fsencode(folder / SOCKET)) <= _MAX_SOCKET_PATH


def running_url(given: Path | None) -> str | None:
    """Return the URL of the Redis that this user's `penstock serve` runs, or None if none runs.

    Raises ConfigError if another user could have created the socket.
    """
    folder = local_folder(given)
    if not os.path.lexists(folder):
        return None
    check_private(folder)
    return _url_in(folder) if _accepts(folder / SOCKET) else None


def note_files(given: Path | None, files_url: str) -> None:
    """Note where this user's `penstock serve` stores files. A note that is too old is harmless: storages have marks."""
    folder = local_folder(given)
    with suppress(OSError, ConfigError):
        check_private(folder)
        new = folder / f".{_FILES}-{os.getpid()}"
        new.write_text(files_url)
        new.replace(folder / _FILES)


def running_files(given: Path | None) -> str | None:
    """Return where this user's `penstock serve` stores files, or None if none has noted it.

    Raises ConfigError if another user could have written the note.
    """
    folder = local_folder(given)
    if not os.path.lexists(folder):
        return None
    check_private(folder)
    try:
        return (folder / _FILES).read_text().strip() or None
    except (OSError, UnicodeDecodeError):
        return None


@dataclass(frozen=True, slots=True)
class LocalAddress:
    """The address of the local Redis, held by this process: no other process may start a server there."""

    folder: Path
    locks: tuple[int, int]
    """Open, locked file descriptors of the folder and of its lock file. A lock lasts until each process that inherited
    the descriptor has closed it. The folder's lock holds if the file is deleted."""

    @classmethod
    def take(cls, given: Path | None) -> Self | RunningRedis:
        """Take the address, or return the Redis that another `penstock serve` runs there.

        Waits while an earlier Redis starts or ends. Raises ConfigError for a folder that is not private to this user,
        and if the other Redis does not answer.
        """
        folder = local_folder(given)
        if not fits_socket(folder):
            raise ConfigError(f"runtime_dir: {folder} is too long a path for a socket", param="runtime_dir")
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_private(folder)
            with ExitStack() as opened:
                locks = _open(folder, os.O_RDONLY | os.O_DIRECTORY, opened), _open(folder / _LOCK, _LOCK_FLAGS, opened)
                if (running := _locked_or_running(locks, folder)) is None:
                    opened.pop_all()
                    return cls(folder, locks)
                return running
        except OSError as error:
            raise ConfigError(f"runtime_dir: {error.filename}: {error.strerror}", param="runtime_dir") from error

    def close(self) -> None:
        """Give the address up."""
        for lock in self.locks:
            os.close(lock)


@dataclass(frozen=True, slots=True)
class RunningRedis:
    """A Redis that another `penstock serve` of this user runs."""

    url: str
    pid: int | None
    """The process id of that command; None if its lock file was deleted."""

    @property
    def owner(self) -> str:
        """That command in words."""
        return "another process" if self.pid is None else f"process {self.pid}"

    def accepts(self) -> bool:
        """Return whether a server accepts connections at the URL."""
        return _accepts(Path(self.url.removeprefix("unix://")))


@contextmanager
def lent_address(given: Path | None, url: str) -> Iterator[None]:
    """Let the local address lead to a server elsewhere, by a link, while no other server of this user is there.

    A later `penstock serve` takes the address, and the server keeps its own.
    """
    link, target = local_folder(given) / SOCKET, url.removeprefix("unix://")
    with suppress(OSError, ConfigError):
        _link(link, target)
    try:
        yield
    finally:
        with suppress(OSError):
            if os.readlink(link) == target:
                link.unlink()


def leads_to(given: Path | None, url: str) -> bool:
    """Return whether the local address is that of a server, or leads to it."""
    return os.path.realpath(local_folder(given) / SOCKET) == os.path.realpath(url.removeprefix("unix://"))


def note_gateway(given: Path | None, redis_url: str, gateway_url: str) -> None:
    """Note the gateway beside the local address, if that leads to this Redis, for commands that ask a gateway."""
    if not leads_to(given, redis_url):
        return
    folder = local_folder(given)
    new = folder / f".{_GATEWAY}-{os.getpid()}"
    with suppress(OSError):
        new.write_text(f"{os.path.realpath(redis_url.removeprefix('unix://'))}\n{gateway_url}\n")
        new.replace(folder / _GATEWAY)


def running_gateway(given: Path | None) -> str | None:
    """Return the URL of the gateway of this user's `penstock serve`, or None if none runs.

    Raises ConfigError as `running_url` does.
    """
    if running_url(given) is None:
        return None
    folder = local_folder(given)
    try:
        socket_path, url = (folder / _GATEWAY).read_text().splitlines()
    except (OSError, ValueError):
        return None
    return url if socket_path == os.path.realpath(folder / SOCKET) else None


def _link(link: Path, target: str) -> None:
    """Raises OSError if another process has the address, and ConfigError if others may enter the folder."""
    folder = link.parent
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private(folder)
    with ExitStack() as opened:
        # A `penstock serve` that takes the address at this moment waits.
        for path, flags in ((folder, os.O_RDONLY | os.O_DIRECTORY), (folder / _LOCK, _LOCK_FLAGS)):
            fcntl.flock(_open(path, flags, opened), fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _accepts(link):
            return
        new = folder / f".{SOCKET}-{os.getpid()}"
        new.symlink_to(target)
        new.replace(link)


def _open(path: Path, flags: int, opened: ExitStack) -> int:
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    opened.callback(os.close, descriptor)
    return descriptor


def _locked_or_running(locks: tuple[int, int], folder: Path) -> RunningRedis | None:
    """Lock folder and file and return None, or return the Redis of the process that holds a lock."""
    _, file = locks
    deadline = time.monotonic() + _TAKE_TIMEOUT_S
    while True:
        with suppress(BlockingIOError):
            for lock in locks:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(file, 0)
            os.pwrite(file, str(os.getpid()).encode(), 0)
            return None
        # After a killed command, its Redis holds the lock until it has ended.
        pid = int(os.pread(file, 20, 0)) if os.fstat(file).st_size else None
        running = RunningRedis(_url_in(folder), pid)
        if (pid is None or _is_alive(pid)) and running.accepts():
            return running
        if time.monotonic() > deadline:
            raise ConfigError(
                f"{folder} is in use by {running.owner}, whose Redis does not answer", param="runtime_dir"
            )
        time.sleep(_POLL_S)


def _url_in(folder: Path) -> str:
    return f"unix://{folder / SOCKET}"


def check_private(folder: Path) -> None:
    """Raise ConfigError unless `folder` is a folder of this user, not a link, which no other user may enter."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        problem = f"{folder} is not a folder of this user; set PENSTOCK_RUNTIME_DIR to one that is"
    elif stat.S_IMODE(found.st_mode) & 0o077:
        problem = f"{folder} is open to other users; `chmod 700 {folder}` closes it"
    else:
        return
    raise ConfigError(f"runtime_dir: {problem}", param="runtime_dir")


def _accepts(path: Path) -> bool:
    """Return whether a server listens on a Unix socket."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_CONNECT_TIMEOUT_S)
            connection.connect(str(path))
    except BlockingIOError:
        return True  # A busy server has not accepted the connections before this one yet.
    except OSError:
        return False
    return True


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return pid > 0
