"""Prometheus metrics of how long an event loop was blocked."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily

from penstock.runtime.loop_watch import LoopWatch


def loop_metrics(late_name: str, hold_name: str, watch: LoopWatch) -> Iterator[Metric]:
    """Yield a histogram of timer delays, named `late_name`, and gauges of the longest hold, named `hold_name`."""
    text = "Delay of the event loop's timers."
    yield HistogramMetricFamily(late_name, text, buckets=watch.delays_s.buckets, sum_value=watch.delays_s.total)
    text = "Longest time that the event loop was blocked in the last 30 to 60 s, by clock; see the runbook."
    family = GaugeMetricFamily(hold_name, text, labels=("clock",))
    hold = watch.longest
    for clock, value in (("wall", hold.wall_s), ("runnable", hold.runnable_s), ("cpu", hold.cpu_s)):
        family.add_metric((clock,), value)
    yield family
