"""The processes around a measurement: a node with the clock engine, a gateway, and what CPU each of them takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from bench.queue_cost.clock import ClockEngine
from penstock.runtime.embedded_redis import EmbeddedRedis

POOL = "clock"
STOP_TIMEOUT_S = 30
CELERY_REDIS = "BENCH_CELERY_REDIS"
"""The variable that gives a module's app of Celery its Redis in a worker."""
Child = tuple[int, dict[str, str]]
"""A process's id, and what it said when it was ready."""


async def serve_node(redis_url: str, step_s: float, num_busy: int, pool: str = POOL) -> None:
    """A node around the clock engine, until SIGTERM."""
    from penstock.gpu_node.process import serve_engine
    from penstock.gpu_node.settings import NodeSettings

    settings = NodeSettings.load(redis_url=redis_url, model=pool, pool=pool, max_num_seqs=512, drain_s=0)
    await serve_engine(settings, ClockEngine(step_s, num_busy))


@contextmanager
def child(*argv: str, **env: str) -> Iterator[Child]:
    """Start a process and wait until it is ready."""
    with subprocess.Popen(
        [sys.executable, "-m", *argv], env=os.environ | env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        try:
            for line in process.stdout or ():
                if (said := json.loads(line))["event"] == "ready":
                    yield process.pid, said
                    return
            raise RuntimeError(f"{argv} ended before it was ready")
        finally:
            process.terminate()
            process.wait(STOP_TIMEOUT_S)


def node(
    redis_url: str, step_ms: float, num_busy: int = 0, pool: str = POOL, **settings: str
) -> AbstractContextManager[Child]:
    """A node of its own; settings by their environment variables."""
    argv = ("bench.queue_cost", "node", redis_url, str(step_ms / 1e3), str(num_busy), pool)
    return child(*argv, PENSTOCK_NODE_PROGRESS="json", **settings)


def gateway(redis_url: str, **env: str) -> AbstractContextManager[Child]:
    """Start a gateway on a free port, which is in its ready line."""
    argv = ("penstock", "gateway", "--redis-url", redis_url, "--port", "0")
    return child(*argv, PENSTOCK_GATEWAY_PROGRESS="json", **env)


def redis_pid(server: EmbeddedRedis) -> int:
    """The server runs under a guard, which knows no other child."""
    guard = server._guard
    assert guard is not None
    return int(Path(f"/proc/{guard.pid}/task/{guard.pid}/children").read_text().split()[0])


def cpu_us(pid: int, *, main_only: bool = False) -> float:
    """CPU time of a process, or of its first thread, which runs its event loop."""
    tasks = [str(pid)] if main_only else os.listdir(f"/proc/{pid}/task")
    return sum(int(Path(f"/proc/{pid}/task/{tid}/schedstat").read_text().split()[0]) for tid in tasks) / 1e3


class CpuMeter:
    """CPU microseconds per token of several processes, over the life of a `with`."""

    def __init__(self, pids: dict[str, int]) -> None:
        self._pids = pids
        self.spent_us: dict[str, float] = {}

    def _read(self) -> dict[str, float]:
        spent = {name: cpu_us(pid) for name, pid in self._pids.items()}
        if (pid := self._pids.get("node")) is not None:
            loop_us = cpu_us(pid, main_only=True)
            spent |= {"node loop": loop_us, "node engine": spent.pop("node") - loop_us}
        return spent

    def __enter__(self) -> CpuMeter:
        self._before, self._before_s = self._read(), time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.wall_s = time.perf_counter() - self._before_s
        self.spent_us = {name: us - self._before[name] for name, us in self._read().items()}

    def report(self, num_tokens: int) -> str:
        parts = [f"{name} {us / num_tokens:.1f}" for name, us in self.spent_us.items()]
        total = sum(us for name, us in self.spent_us.items() if name != "node engine")
        rate = f"{num_tokens / self.wall_s:,.0f} tokens/s"
        return f"{rate}; CPU us/token: {', '.join(parts)}; all but the engine {total / num_tokens:.1f}"


@contextmanager
def celery_worker(module: str, redis_url: str, pool: str, concurrency: int) -> Iterator[None]:
    """Run a worker of the app of Celery that a module makes from CELERY_REDIS."""
    argv = [sys.executable, "-m", "celery", "-A", module, "worker", "--loglevel", "ERROR", "--pool", pool]
    env = os.environ | {CELERY_REDIS: redis_url}
    with subprocess.Popen([*argv, "--concurrency", str(concurrency)], env=env, stdout=subprocess.DEVNULL) as running:
        try:
            yield
        finally:
            running.terminate()
            running.wait(STOP_TIMEOUT_S)
