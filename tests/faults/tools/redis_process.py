"""A redis-server that tests kill, hold up, restart, and set back to an older state."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import redis

from penstock.runtime.embedded_redis import find_redis_server

START_TIMEOUT_S = 60.0


class RedisProcess:
    """One server in a folder of its own; what it appended to its log survives a kill. On a port if one is given.

    Where it has an ACL file, `user` is the user that the tests themselves are, with its name as its password.
    """

    def __init__(self, folder: Path, *, port: int = 0, user: str = "", **options: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.port = port
        self._user = user
        self._options = {"appendonly": "yes", "appendfsync": "everysec", "save": "", **options}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it listens."""
        return self.url_of(self._user)

    def url_of(self, user: str) -> str:
        """The same for one of its users, whose password is the name."""
        login = f"{user}:{user}@" if user else ""
        return f"redis://{login}127.0.0.1:{self.port}" if self.port else f"unix://{login}{self.folder / 'redis.sock'}"

    @property
    def address(self) -> str | tuple[str, int]:
        """The same, for a socket."""
        return ("127.0.0.1", self.port) if self.port else str(self.folder / "redis.sock")

    @property
    def pid(self) -> int:
        """The server's process id."""
        assert self._process is not None
        return self._process.pid

    def client(self) -> redis.Redis:
        """A connection that nothing disturbs but the server's own end."""
        return redis.Redis.from_url(self.url)

    def start(self, *, until: str = "ready") -> Self:
        """Starts it on what its folder holds; returns once it has loaded that, or (`until="listening"`) before."""
        place = {"port": self.port, "dir": self.folder, "logfile": self.folder / "redis.log"}
        place |= {} if self.port else {"unixsocket": self.folder / "redis.sock"}
        words = [word for name, value in (place | self._options).items() for word in (f"--{name}", *_words(value))]
        self._process = subprocess.Popen([str(find_redis_server()), *words])
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not self._answers(until):
            assert time.monotonic() < deadline_s and self._process.poll() is None, "redis-server does not start"
            time.sleep(0.005)
        return self

    def kill(self) -> None:
        """SIGKILL, now."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """An orderly end."""
        assert self._process is not None
        self._process.terminate()
        self._process.wait()

    def pause(self) -> None:
        """It stops where it is; its connections stay."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """It goes on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def copy_log(self) -> Path:
        """A folder with what a server would find if it had to start from now."""
        copy = self.folder / "copy"
        _copy_log(self.folder, copy)
        return copy

    def restart_from(self, copy: Path) -> None:
        """Killed and started again with what an older log says."""
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
    """Return a TCP port without a listener."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
