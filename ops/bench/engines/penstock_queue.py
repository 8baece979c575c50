"""Client → Redis → node → Redis → client. Options are fields of the node's settings."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from bench.child import Spec, main
from bench.drive import drive_streams, fine_runner
from bench.stopwatch import Stopwatch
from bench.workload import BenchRequest, Workload

if TYPE_CHECKING:
    from penstock import AsyncClient


class QueuedSession:
    in_own_process = False

    def __init__(self, client: AsyncClient, runner: asyncio.Runner, redis_url: str, node_pid: int) -> None:
        self._client = client
        self.redis_url = redis_url
        self.node_pid = node_pid
        self._runner = runner

    def run(self, workload: Workload, watch: Stopwatch) -> None:
        self._runner.run(drive_streams(self._ask, workload, watch))

    def extra(self) -> dict[str, float]:
        return {}

    async def _ask(self, i: int, request: BenchRequest, watch: Stopwatch) -> None:
        answer = self._client.stream(request.prompt, temperature=0, max_tokens=request.num_output, ignore_eos=True)
        async for chunk in answer:
            if chunk.token_ids:
                watch.saw(i, len(chunk.token_ids))


@contextmanager
def serve_model(redis_url: str, spec: Spec) -> Iterator[int]:
    """A node that is ready; its process's id."""
    settings = {"model": spec.weights, "progress": "json"} | spec.options
    env = {f"PENSTOCK_NODE_{name.upper()}": str(value) for name, value in settings.items()}
    node = subprocess.Popen(
        [sys.executable, "-m", "penstock", "node"],
        env=os.environ | {"PENSTOCK_REDIS_URL": redis_url} | env,
        stdout=subprocess.PIPE,
    )
    try:
        if not any(json.loads(line)["event"] == "ready" for line in node.stdout or ()):
            raise RuntimeError(f"the node ended with status {node.wait()}")
        yield node.pid
    finally:
        node.terminate()
        node.wait(60)


@contextmanager
def open_session(
    spec: Spec, serve: Callable[[str, Spec], AbstractContextManager[int]] = serve_model
) -> Iterator[QueuedSession]:
    from penstock import AsyncClient
    from penstock.runtime.embedded_redis import EmbeddedRedis

    with EmbeddedRedis() as redis, serve(redis.url, spec) as node_pid, fine_runner() as runner:
        client = AsyncClient(redis.url)
        runner.run(client.connect())
        try:
            yield QueuedSession(client, runner, redis.url, node_pid)
        finally:
            runner.run(client.close())


if __name__ == "__main__":
    main(open_session)
