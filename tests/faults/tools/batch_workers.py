"""Celery workers that hold stored batches, and a scheduler that sends them tasks meanwhile; all of them are killed."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from faults.tools.redis_process import RedisProcess
from faults.tools.report import Measurement
from faults.tools.soak_kills import Fleet

from penstock.producer.batch.celery_app import KEY_PREFIX
from penstock.producer.batch.installation import QUEUE

MODEL_VARIABLE, EVERY_VARIABLE = "FAULTS_SCHEDULE_MODEL", "FAULTS_EVERY_S"
_WORKER = ("worker", "--loglevel", "INFO", "--without-mingle", "--without-gossip")
_POOLS = (("--pool", "threads", "--concurrency", "4"), ("--pool", "prefork", "--concurrency", "2"))
_EVERY_S = 1.0
_LAST_TASKS_S = 120.0
_RESULTS = f"{KEY_PREFIX}celery-task-meta-*"


class CeleryProcess:
    """A `celery` command of the app in `scheduled_app.py`, in a process group of its own."""

    def __init__(self, words: Sequence[str], log: Path, env: dict[str, str]) -> None:
        self._log = log
        command = (sys.executable, "-m", "celery", "-A", "faults.tools.scheduled_app", *words)
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                command, env=os.environ | env, stdout=file, stderr=subprocess.STDOUT, process_group=0
            )

    @property
    def log(self) -> str:
        """Return the log so far."""
        return self._log.read_text(errors="replace")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all processes of the group."""
        os.killpg(self._process.pid, number)

    def close(self) -> None:
        """Kill the group. The process must not have ended by itself."""
        assert self._process.poll() is None, f"it has ended with {self._process.returncode}:\n{self.log[-2000:]}"
        self.signal(signal.SIGKILL)
        self._process.wait()


class WorkerFleet(Fleet):
    """Two workers hold the batches. Gateways run only until the batch is made, and after its end."""

    def __init__(self, redis: RedisProcess, pool: str, folder: Path, **options: Any) -> None:
        super().__init__(redis, pool, **options)
        self._folder = folder
        self._num_celery = 0
        self._env = {"PENSTOCK_REDIS_URL": redis.url, MODEL_VARIABLE: pool, EVERY_VARIABLE: str(_EVERY_S)}
        self.workers: list[CeleryProcess] = []
        self.scheduler: CeleryProcess | None = None

    @property
    def holders(self) -> Sequence[Any]:
        """The processes that run batches."""
        return self.workers

    @property
    def kinds(self) -> Sequence[str]:
        """What may be killed."""
        return ("worker", "worker", "worker", "scheduler", "node", "redis")

    async def begin(self) -> None:
        """Leave the batch to the workers."""
        for gateway in self.gateways:
            gateway.close()
        self.workers = [self._start_worker(place) for place in range(len(_POOLS))]
        self.scheduler = self._start_scheduler()

    async def end(self) -> None:
        """Let the workers end the tasks that they have, and serve the results."""
        if self.scheduler is not None:
            self.scheduler.close()
            self.scheduler = None
        self.gateways = [await self._start_gateway(place) for place in range(len(self.gateways))]
        async with asyncio.timeout(_LAST_TASKS_S):
            while self._num_open_tasks():
                await asyncio.sleep(0.5)

    def close(self) -> None:
        """Kill all processes except Redis."""
        super().close()
        for process in (*self.workers, *((self.scheduler,) if self.scheduler is not None else ())):
            process.close()

    async def kill_worker(self, rng: random.Random) -> None:
        """Send SIGKILL to all processes of a worker, and replace it."""
        await self.kill_holder_at(rng.randrange(len(self.workers)))

    async def kill_holder_at(self, place: int) -> None:
        """Send SIGKILL to all processes of the worker at this place, and replace it."""
        self.workers[place].close()
        self.workers[place] = self._start_worker(place)

    async def kill_scheduler(self, _: random.Random) -> None:
        """Send SIGKILL to the scheduler, and replace it."""
        assert self.scheduler is not None
        self.scheduler.close()
        self.scheduler = self._start_scheduler()

    def problems(self) -> list[str]:
        """Return what contradicts that each scheduled task that a worker has taken has ended well, and once."""
        with self.redis.client() as redis:
            states = [json.loads(redis.get(name) or b"{}") for name in redis.keys(_RESULTS)]
        jobs = [one["result"]["id"] for one in states if one["status"] == "SUCCESS"]
        problems = [
            f"a scheduled task is {one['status']}: {one['result']}" for one in states if one["status"] != "SUCCESS"
        ]
        if len(set(jobs)) != len(jobs) or not jobs:
            problems.append(f"{len(jobs)} scheduled tasks have {len(set(jobs))} jobs")
        return problems

    def measurements(self) -> dict[str, Measurement]:
        """Return how many scheduled tasks have ended."""
        with self.redis.client() as redis:
            return {"scheduled tasks": len(cast("list[bytes]", redis.keys(_RESULTS)))}

    def _num_open_tasks(self) -> int:
        with self.redis.client() as redis:
            counts = redis.llen(KEY_PREFIX + QUEUE), redis.hlen(f"{KEY_PREFIX}unacked")
        return sum(cast("tuple[int, int]", counts))

    def _start_worker(self, place: int) -> CeleryProcess:
        return self._start_celery((*_WORKER, "-n", f"w{place}@faults", *_POOLS[place]))

    def _start_scheduler(self) -> CeleryProcess:
        return self._start_celery(("beat", "--schedule", str(self._folder / "schedule"), "--pidfile", ""))

    def _start_celery(self, words: Sequence[str]) -> CeleryProcess:
        self._num_celery += 1
        return CeleryProcess(words, self._folder / f"celery-{self._num_celery}.log", self._env)
