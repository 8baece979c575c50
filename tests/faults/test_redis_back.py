"""Redis is stopped and started again: how soon a waiting submission is accepted, and the node shown as healthy."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from fakes.processes.node_process import NodeProcess
from faults.tools.processes import GatewayProcess
from faults.tools.redis_process import RedisProcess

ACCEPTED_S, HEALTHY_S = 0.5, 2.0
"""The most seconds after Redis has loaded its file."""
AWAY_S = 7.0
"""A node says after 5 s that Redis does not answer."""
TRIES = 4
"""A busy machine only makes each of them slower, so the fastest one counts. A node of its own serves in each."""
PATIENCE_S = 60.0
POOL = "reference"


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisProcess]:
    with RedisProcess(tmp_path / "redis") as server:
        yield server


def is_healthy(http: httpx.Client) -> bool:
    """Whether the gateway shows that the node was without its Redis, and that nothing of it is in trouble now."""
    answer = http.get("/health/nodes")
    nodes = answer.json().get(POOL, ()) if answer.status_code == 200 else ()
    # A machine that is held up makes these two at any time.
    return bool(nodes) and "redis" in nodes[0]["past_troubles"] and nodes[0]["troubles"].keys() <= {"loop", "clock"}


def seconds_until(start_s: float, http: httpx.Client) -> float:
    """Return the seconds until the node is healthy."""
    while not is_healthy(http):
        assert time.monotonic() < start_s + PATIENCE_S
        time.sleep(0.02)
    return time.monotonic() - start_s


def accepted_s(http: httpx.Client) -> float:
    """Submit a job, and return when it was accepted."""
    answer = http.post("/v1/jobs", json={"model": POOL, "prompt": "hello", "max_tokens": 2})
    assert answer.status_code == 202, answer.text
    return time.monotonic()


def outage(redis: RedisProcess, http: httpx.Client, pool: ThreadPoolExecutor) -> tuple[float, float]:
    """Stop Redis and start it again. Return the seconds until a job was accepted, and until the node was healthy."""
    redis.stop()
    began_s, waiting = time.monotonic(), list[Future[float]]()
    while time.monotonic() < began_s + AWAY_S:
        # One that has waited since the beginning, and one that began just before.
        if len(waiting) < 1 + (time.monotonic() > began_s + AWAY_S - 0.5):
            waiting.append(pool.submit(accepted_s, http))
        time.sleep(0.05)
    redis.start()
    back_s = time.monotonic()
    healthy = pool.submit(seconds_until, back_s, http)
    return max(one.result() for one in waiting) - back_s, healthy.result()


def test_after_redis_is_back_a_waiting_job_is_accepted_and_the_node_is_healthy_at_once(redis: RedisProcess) -> None:
    with ExitStack() as stack:
        gateway = stack.enter_context(GatewayProcess(redis.url))
        http = stack.enter_context(httpx.Client(base_url=gateway.url, timeout=PATIENCE_S))
        pool = stack.enter_context(ThreadPoolExecutor(4))
        took = list[tuple[float, float]]()
        while len(took) < TRIES:
            # A node that had such an outage before would be shown as one at once.
            with NodeProcess(redis.url):
                accepted_s(http)
                took.append(outage(redis, http, pool))
            if min(one for one, _ in took) <= ACCEPTED_S and min(one for _, one in took) <= HEALTHY_S:
                break
        assert min(one for one, _ in took) <= ACCEPTED_S, took
        assert min(one for _, one in took) <= HEALTHY_S, took
