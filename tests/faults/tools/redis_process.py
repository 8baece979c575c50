"""A redis-server that tests kill, pause, restart, and reset to an older state."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import redis
from fakes.waiting import wait_until

from penstock.runtime.embedded_redis import find_redis_server

_PORTS = range(10_000, 32_768)
"""Linux gives higher ones to connections: another process may get one before the server of a test listens there."""
_given_ports = set[int]()
_LIBFAKETIME = "**/faketime/libfaketime.so.1"


class RedisProcess:
    """One server in its own folder. Its append-only file survives a kill. It listens on a port if one is given.

    If it has an ACL file, the tests connect as `user`, whose password is its name. With `clock_s`, its clock is so many
    seconds ahead; that needs libfaketime.
    """

    def __init__(
        self,
        folder: Path,
        *,
        port: int = 0,
        user: str = "",
        clock_s: float = 0.0,
        program: Path | None = None,
        variables: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        """`program`: the server, if not the one that penstock finds. `variables`: more of its environment."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.port = port
        self._user = user
        self.clock_s = clock_s
        self._program = program
        self._variables = variables or {}
        self._options = {"appendonly": "yes", "appendfsync": "everysec", "save": "", **options}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The URL for the tests' user."""
        return self.url_of(self._user)

    def url_of(self, user: str) -> str:
        """Return the URL for a user whose password is its name."""
        login = f"{user}:{user}@" if user else ""
        return f"redis://{login}127.0.0.1:{self.port}" if self.port else f"unix://{login}{self.folder / 'redis.sock'}"

    @property
    def address(self) -> str | tuple[str, int]:
        """The address as a socket takes it."""
        return ("127.0.0.1", self.port) if self.port else str(self.folder / "redis.sock")

    @property
    def pid(self) -> int:
        """The server's process id."""
        assert self._process is not None
        return self._process.pid

    def client(self) -> redis.Redis:
        """A connection that fails only if the server ends."""
        return redis.Redis.from_url(self.url)

    def start(self, *, until: str = "ready") -> Self:
        """Start the server on its folder. Return once data is loaded, or (`until="listening"`) before."""
        place = {"port": self.port, "dir": self.folder, "logfile": self.folder / "redis.log"}
        place |= {} if self.port else {"unixsocket": self.folder / "redis.sock"}
        words = [word for name, value in (place | self._options).items() for word in (f"--{name}", *_words(value))]
        program = str(self._program or find_redis_server())
        self._process = subprocess.Popen(
            [program, *words], env={**os.environ, **faked_clock(self.clock_s), **self._variables}
        )
        process, log = self._process, self.folder / "redis.log"
        wait_until(
            lambda: self._answers(until),
            what=lambda: f"redis-server does not start (exit status {process.poll()}):\n{log.read_text()[-2000:]}",
            meanwhile=lambda: process.poll() is None,
        )
        return self

    def kill(self) -> None:
        """Send SIGKILL."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """Shut down."""
        assert self._process is not None
        self._process.terminate()
        self._process.wait()

    def start_empty(self, **options: Any) -> Self:
        """Kill the server if it runs, and start it with further options and without its data."""
        self.kill()
        shutil.rmtree(self.folder)
        self.folder.mkdir()
        self._options |= options
        return self.start()

    def pause(self) -> None:
        """Send SIGSTOP; connections stay open."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Send SIGCONT."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def copy_log(self) -> Path:
        """Return a copy of the folder as a server would load it now."""
        copy = self.folder / "copy"
        _copy_log(self.folder, copy)
        return copy

    def restart_from(self, copy: Path) -> None:
        """Kill the server and start it from an older log."""
        self.kill()
        _copy_log(copy, self.folder)
        self.start()

    def _answers(self, until: str) -> bool:
        try:
            with self.client() as client:
                return bool(client.ping())
        except redis.BusyLoadingError:
            return until == "listening"
        except redis.RedisError:
            return False

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def find_libfaketime() -> Path | None:
    """Return the library that gives a program another clock; None where it is not installed."""
    found = [path for folder in ("/usr/lib", "/usr/local/lib") for path in Path(folder).glob(_LIBFAKETIME)]
    return found[0] if found else None


def faked_clock(ahead_s: float) -> dict[str, str]:
    """Return what the environment of a program needs whose clock is ahead. Its timers run as always."""
    if not ahead_s:
        return {}
    library = find_libfaketime()
    assert library is not None, "libfaketime is not installed (Debian's package libfaketime)"
    return {"LD_PRELOAD": str(library), "FAKETIME": f"{ahead_s:+g}s", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}


def _copy_log(source: Path, target: Path) -> None:
    """The log is a file up to Redis 6.2, a folder since 7."""
    target.mkdir(exist_ok=True)
    for log in source.glob("appendonly*"):
        if log.is_dir():
            shutil.copytree(log, target / log.name, dirs_exist_ok=True)
        else:
            shutil.copy(log, target)


def _words(value: Any) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, tuple) else (str(value),)


def free_port() -> int:
    """Return a TCP port without a listener, each one once."""
    while True:
        port = secrets.choice(_PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if port not in _given_ports:
                _given_ports.add(port)
                return port
