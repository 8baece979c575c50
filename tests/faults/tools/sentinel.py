"""A primary, a replica behind a link that a test delays, stops or cuts, and sentinels that promote the replica."""

from __future__ import annotations

import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import redis
from fakes.waiting import wait_until
from faults.tools.redis_process import RedisProcess, free_port

from penstock.runtime.embedded_redis import find_redis_server

NAME = "m"
DOWN_AFTER_MS = 1000
FAILOVER_TIMEOUT_MS = 900_000
_READ_BYTES = 1 << 20
_POLL_S = 0.005


class ReplicationLink:
    """A proxy of the replication stream, on threads of its own."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.delay_s = 0.0
        """Seconds by which the replica is behind."""
        self._is_stopped = self._is_cut = False
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def stop(self) -> None:
        """Let nothing through from now on. Both ends keep their connections."""
        self._is_stopped = True

    def cut(self) -> None:
        """Close the connections, and accept no others."""
        self._is_cut = True
        for one in (self._listener, *self._sockets):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self._sockets.append(near)
                try:
                    far = socket.create_connection(self._target)
                except OSError:
                    near.close()  # the primary is dead
                    continue
                self._sockets.append(far)
                threading.Thread(target=self._pump, args=(near, far, False), daemon=True).start()
                threading.Thread(target=self._pump, args=(far, near, True), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, from_primary: bool) -> None:
        with suppress(OSError):
            while data := source.recv(_READ_BYTES):
                if from_primary and self.delay_s:
                    time.sleep(self.delay_s)
                while from_primary and self._is_stopped and not self._is_cut:
                    time.sleep(_POLL_S)
                sink.sendall(data)
        for one in (source, sink):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


class Replicated:
    """Two servers and sentinels on local ports. The replica follows the primary through `link`.

    `stays_primary`: the sentinels cannot make the old primary a replica, as if the network were split. `clock_s`: how
    many seconds the replica's clock is ahead. `announced`: the ports by which the sentinels know the two servers.
    """

    def __init__(
        self,
        folder: Path,
        *,
        num_sentinels: int = 1,
        stays_primary: bool = False,
        clock_s: float = 0.0,
        announced: tuple[int, int] | None = None,
        down_after_ms: int = DOWN_AFTER_MS,
    ) -> None:
        self._folder = folder
        self._down_after_ms = down_after_ms
        self._stays_primary = stays_primary
        self._ports = [free_port() for _ in range(num_sentinels)]
        port = free_port()
        self.link = ReplicationLink(("127.0.0.1", port))
        self.master = RedisProcess(folder / "master", port=port)
        own_port = free_port()
        self._announced = announced or (port, own_port)
        self.replica = RedisProcess(folder / "replica", port=own_port, clock_s=clock_s, **self._following())
        self.sentinels: list[subprocess.Popen[bytes]] = []
        self._stack = ExitStack()

    @property
    def url(self) -> str:
        """The URL with which penstock asks the sentinels."""
        return self.url_of(range(len(self._ports)))

    def url_of(self, numbers: Sequence[int]) -> str:
        """Return the URL with some of the sentinels."""
        hosts = ",".join(f"127.0.0.1:{self._ports[number]}" for number in numbers)
        return f"redis+sentinel://{hosts}/0?master_name={NAME}"

    @property
    def sentinel_port(self) -> int:
        """The port of the first sentinel."""
        return self._ports[0]

    @property
    def has_promoted(self) -> bool:
        """Whether a sentinel names the replica as the primary."""
        with redis.Redis(port=self._ports[-1]) as sentinel:
            return bool(sentinel.sentinel_get_master_addr_by_name(NAME)[1] == self._announced[1])

    def fail_over(self, number: int = 0) -> None:
        """Let a sentinel promote the replica although the primary lives."""
        with redis.Redis(port=self._ports[number]) as sentinel:
            sentinel.execute_command("SENTINEL", "FAILOVER", NAME)

    def wait_for_promotion(self) -> tuple[str, int]:
        """Wait until a sentinel names the replica as the primary, and return its address."""
        with redis.Redis(port=self._ports[-1]) as sentinel:
            _wait_until(lambda: sentinel.sentinel_get_master_addr_by_name(NAME)[1] == self._announced[1])
        with self.replica.client() as client:
            _wait_until(lambda: client.role()[0] == b"master")
        return "127.0.0.1", self.replica.port

    def rejoin(self) -> None:
        """Make the old primary an empty replica of the new one, behind a new link."""
        self._cut()
        self.master, self.replica = self.replica, self.master
        self._announced = self._announced[::-1]
        self.link = ReplicationLink(("127.0.0.1", self.master.port))
        self.replica.start_empty(**self._following())
        self._wait_until_followed()

    def wait_until_known(self) -> None:
        """Wait until each sentinel knows both servers by their present roles."""
        for port in self._ports:
            with redis.Redis(port=port) as sentinel:
                _wait_until(lambda known=sentinel: _knows_roles(known, *self._announced))  # type: ignore[misc]

    def _cut(self) -> None:
        self.link.cut()

    def _following(self) -> dict[str, Any]:
        """Return the options of the replica."""
        return {"replicaof": ("127.0.0.1", self.link.port), "replica-announce-port": self._announced[1]}

    def _wait_until_followed(self) -> None:
        with self.replica.client() as client:
            _wait_until(lambda: client.info("replication")["master_link_status"] == "up")
        if self._stays_primary:
            # Sentinel promotes and demotes by this command. The tests use REPLICAOF.
            with self.master.client() as client:
                client.execute_command("ACL", "SETUSER", "default", "-slaveof")

    def __enter__(self) -> Self:
        with self._stack:
            self._stack.callback(self._cut)
            self._stack.enter_context(self.master)
            self._stack.enter_context(self.replica)
            self._wait_until_followed()
            for port in self._ports:
                self._start_sentinel(port)
            for port, process in zip(self._ports, self.sentinels, strict=True):
                with redis.Redis(port=port) as sentinel:
                    try:
                        _wait_until(partial(self._is_ready, sentinel, process))
                    except AssertionError as error:
                        error.add_note(self._log_of(port).read_text()[-2000:])
                        raise
            self._stack = self._stack.pop_all()
        return self

    def _is_ready(self, sentinel: redis.Redis, process: subprocess.Popen[bytes]) -> bool:
        assert process.poll() is None, f"the sentinel ended with status {process.returncode}"
        return _knows(sentinel, len(self._ports) - 1)

    def _log_of(self, port: int) -> Path:
        return self._folder / f"sentinel-{port}" / "sentinel.log"

    def _start_sentinel(self, port: int) -> None:
        folder = self._log_of(port).parent
        folder.mkdir()
        lines = (
            f"port {port}",
            f"sentinel monitor {NAME} 127.0.0.1 {self._announced[0]} {len(self._ports) // 2 + 1}",
            f"sentinel down-after-milliseconds {NAME} {self._down_after_ms}",
            # After this time a sentinel would let the replica follow the primary directly, without the link.
            f"sentinel failover-timeout {NAME} {FAILOVER_TIMEOUT_MS}",
            f"dir {folder}",
            f"logfile {self._log_of(port)}",
        )
        (folder / "sentinel.conf").write_text("\n".join(lines) + "\n")
        process = subprocess.Popen([str(find_redis_server()), str(folder / "sentinel.conf"), "--sentinel"])
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        self.sentinels.append(process)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()


def _knows(sentinel: redis.Redis, num_others: int) -> bool:
    state = cast(dict[str, Any], sentinel.sentinel_master(NAME))
    return bool(state["num-slaves"] == 1 and state["num-other-sentinels"] == num_others)


def _knows_roles(sentinel: redis.Redis, primary_port: int, replica_port: int) -> bool:
    state = cast(dict[str, Any], sentinel.sentinel_master(NAME))
    replicas = sentinel.sentinel_slaves(NAME)
    return bool(
        state["port"] == primary_port
        and [one["port"] for one in replicas] == [replica_port]
        and replicas[0]["flags"] == "slave"
        and replicas[0]["role-reported"] == "slave"
        and replicas[0]["master-link-status"] == "ok"
    )


def _wait_until(holds: Callable[[], bool]) -> None:
    wait_until(holds, but=redis.RedisError)
