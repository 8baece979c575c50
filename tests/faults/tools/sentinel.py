"""A master, a replica, and a sentinel that promotes it. Clients connect through a proxy whose target changes."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import redis
from faults.tools.redis_process import START_TIMEOUT_S, RedisProcess, free_port

from penstock.runtime.embedded_redis import find_redis_server

_DOWN_AFTER_MS = 1000


class Replicated:
    """Two servers on local ports and one sentinel with a quorum of one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = free_port()
        self.master = RedisProcess(folder / "master", port=free_port())
        self.replica = RedisProcess(folder / "replica", port=free_port(), replicaof=("127.0.0.1", self.master.port))
        self._stack = ExitStack()

    def wait_for_promotion(self) -> tuple[str, int]:
        """Wait until sentinel names the replica as the master, and return its address."""
        self._wait_until(lambda: self._sentinel.sentinel_get_master_addr_by_name("m")[1] == self.replica.port)
        with self.replica.client() as client:
            self._wait_until(lambda: client.role()[0] == b"master")
        return "127.0.0.1", self.replica.port

    def __enter__(self) -> Self:
        with self._stack:
            self._stack.enter_context(self.master)
            self._stack.enter_context(self.replica)
            with self.replica.client() as client:
                self._wait_until(lambda: client.info("replication")["master_link_status"] == "up")
            self._start_sentinel()
            self._wait_until(lambda: self._sentinel.sentinel_master("m")["num-slaves"] == 1)
            self._stack = self._stack.pop_all()
        return self

    def _start_sentinel(self) -> None:
        settings = self._folder / "sentinel.conf"
        lines = (
            f"port {self._port}",
            f"sentinel monitor m 127.0.0.1 {self.master.port} 1",
            f"sentinel down-after-milliseconds m {_DOWN_AFTER_MS}",
            f"dir {self._folder}",
            f"logfile {self._folder / 'sentinel.log'}",
        )
        settings.write_text("\n".join(lines) + "\n")
        process = subprocess.Popen([str(find_redis_server()), str(settings), "--sentinel"])
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        self._sentinel = self._stack.enter_context(redis.Redis(port=self._port))

    @staticmethod
    def _wait_until(holds: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                if holds():
                    return
            except redis.RedisError:
                pass
            assert time.monotonic() < deadline_s
            time.sleep(0.05)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()
