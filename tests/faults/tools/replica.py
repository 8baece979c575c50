"""A Redis and a replica of it, which tests pause, kill and start again."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fakes.waiting import wait_until
from faults.tools.redis_process import RedisProcess, free_port


class ReplicatedRedis:
    """A primary on a local port, and one replica of it. Clients use the primary."""

    def __init__(self, folder: Path, **options: Any) -> None:
        # Without the option a first copy begins five seconds after the replica asked for it, from Redis 7 on.
        soon: dict[str, Any] = {"repl-diskless-sync-delay": 0}
        self.primary = RedisProcess(folder / "primary", port=free_port(), **soon, **options)
        self.replica = RedisProcess(folder / "replica", replicaof=("127.0.0.1", self.primary.port), appendonly="no")

    @property
    def url(self) -> str:
        """The URL of the primary."""
        return self.primary.url

    def wait_for_replica(self) -> None:
        """Wait until the primary lists the replica as connected, and has heard of it just now."""
        with self.primary.client() as client:
            wait_until(lambda: client.wait(1, 100) == 1 and client.role()[2])

    def wait_for_loss(self) -> None:
        """Wait until the primary lists no replica."""
        with self.primary.client() as client:
            wait_until(lambda: not client.role()[2])

    def replica_has(self, key: str) -> bool:
        """Return whether the replica has a key now."""
        with self.replica.client() as client:
            return bool(client.exists(key))

    def __enter__(self) -> Self:
        self.primary.start()
        try:
            self.replica.start()
            self.wait_for_replica()
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """End both servers."""
        self.replica.__exit__(None, None, None)
        self.primary.__exit__(None, None, None)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
