"""The names of all metrics that penstock's processes report."""

from __future__ import annotations

import re
from dataclasses import fields
from functools import cache

from penstock.contract.pool import EVENTS
from penstock.gateway.metrics import GatewayMetrics
from penstock.gpu_node.engine.records import EngineStats
from penstock.gpu_node.jobs.times import JobMetrics
from penstock.gpu_node.monitor.engine_metrics import engine_metrics
from penstock.gpu_node.monitor.metrics import COUNTED, job_metrics
from penstock.producer.client import ClientStats
from penstock.runtime.histogram import Histogram
from tests.source_tree import modules

_SIZES = Histogram((1, 2))
STATS = EngineStats(
    steps=0, prefill_tokens=0, decode_tokens=0, step_seconds=_SIZES, batch_sequences=_SIZES, batch_tokens=_SIZES
)


@cache
def sources() -> str:
    """Return the text of all modules."""
    return "".join(module.path.read_text() for module in modules().values())


def known_metrics() -> set[str]:
    """Return the names, without the suffixes of counters and histograms."""
    names = {metric.name for metric in GatewayMetrics().registry.collect()}
    names |= {f"penstock_pool_{event}" for event in EVENTS}
    names |= {f"penstock_client_{field.name}" for field in fields(ClientStats)}
    names |= {metric.name for metric in engine_metrics(STATS)}
    names |= {metric.name for metric in job_metrics(JobMetrics(), "model")}
    names |= {f"penstock_node_{name}" for name in COUNTED}
    return names | set(re.findall(r'"(penstock_\w+)"', sources()))
