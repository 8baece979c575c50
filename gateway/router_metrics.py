"""A gateway's metrics under the names of vLLM's router, which its dashboards and autoscalers query."""

from __future__ import annotations

import os
import shutil
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from penstock.queue.pool_stats import PoolStats

WINDOW_S = 60
"""Seconds over which requests per second are a mean."""
_SERVER = "gateway"


class RequestRate:
    """Counts requests in the last `WINDOW_S` seconds, with one entry for each second that had some."""

    def __init__(self) -> None:
        self._seconds: deque[tuple[int, int]] = deque()

    def note(self) -> None:
        """Count a request."""
        now = int(time.monotonic())
        count = self._seconds.pop()[1] if self._seconds and self._seconds[-1][0] == now else 0
        self._seconds.append((now, count + 1))
        self._forget(now)

    @property
    def per_s(self) -> float:
        """The mean requests per second."""
        self._forget(int(time.monotonic()))
        return sum(count for _, count in self._seconds) / WINDOW_S

    def _forget(self, now: int) -> None:
        while self._seconds and self._seconds[0][0] <= now - WINDOW_S:
            self._seconds.popleft()


class ProcessUsage:
    """The CPU time, memory and disk that this process uses, in percent."""

    def __init__(self) -> None:
        self._wall_s, self._cpu_s = time.monotonic(), time.process_time()

    def cpu_percent(self) -> float:
        """Return the percent of one core that this process used since the last call."""
        wall_s, cpu_s = time.monotonic(), time.process_time()
        elapsed_s, used_s = wall_s - self._wall_s, cpu_s - self._cpu_s
        self._wall_s, self._cpu_s = wall_s, cpu_s
        return 100 * used_s / elapsed_s if elapsed_s > 0 else 0.0

    @staticmethod
    def memory_percent() -> float:
        """Return the percent of the machine's memory that this process holds."""
        resident = int(Path("/proc/self/statm").read_text().split()[1])
        return 100 * resident / os.sysconf("SC_PHYS_PAGES")

    @staticmethod
    def disk_percent() -> float:
        """Return the percent of the root file system that is used."""
        usage = shutil.disk_usage("/")
        return 100 * usage.used / usage.total


def process_metrics(rate: RequestRate, usage: ProcessUsage) -> Iterator[Metric]:
    """Yield the metrics that need no Redis."""
    for name, text, value in (
        ("cpu", "Percent of one core that this gateway used since the last scrape.", usage.cpu_percent()),
        ("memory", "Percent of the machine's memory that this gateway holds.", usage.memory_percent()),
        ("disk", "Percent of the root file system that is used.", usage.disk_percent()),
    ):
        yield GaugeMetricFamily(f"router_{name}_usage_percent", text, value=value)
    text = f"POST requests that this gateway answered per second, over {WINDOW_S} s."
    qps = GaugeMetricFamily("vllm:current_qps", text, labels=("server",))
    qps.add_metric((_SERVER,), rate.per_s)
    yield qps


def pool_metrics(pools: Sequence[PoolStats]) -> Iterator[Metric]:
    """Yield the metrics of the pools."""
    live = GaugeMetricFamily("vllm:healthy_pods_total", "Live nodes of a pool.", labels=("server",))
    text = "Jobs that a pool accepted, by any client."
    accepted = CounterMetricFamily("vllm:num_incoming_requests", text, labels=("model",))
    for pool in pools:
        live.add_metric((pool.pool,), len(pool.nodes))
        accepted.add_metric((pool.pool,), pool.counts["submitted"])
    yield live
    yield accepted
