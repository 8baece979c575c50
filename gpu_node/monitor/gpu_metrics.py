"""Prometheus metrics of a node's GPU, as its driver reports them (NVML).

They need the package nvidia-ml-py (extra `gpu`). It is imported only on a node with a GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric

log = logging.getLogger(__name__)

_GAUGES = {
    "penstock_gpu_utilization_ratio": "Share of the driver's last sample period in which a kernel ran on the GPU.",
    "penstock_gpu_memory_used_bytes": "Memory of the GPU that is in use, by any process.",
    "penstock_gpu_memory_total_bytes": "Memory of the GPU.",
}


class GpuMetrics:
    """Reads the metrics of one GPU. The driver's library is loaded at the first scrape."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._gpu: Any = None
        self._is_opened = False

    def collect(self, uuid: str) -> Iterator[Metric]:
        """Yield the metrics of the GPU with this UUID: none for an empty UUID, and none while the driver fails."""
        if not uuid:
            return
        if not self._is_opened:
            self._is_opened = True
            self._open(uuid)
        if self._gpu is None:
            return
        try:
            rates = self._nvml.nvmlDeviceGetUtilizationRates(self._gpu)
            memory = self._nvml.nvmlDeviceGetMemoryInfo(self._gpu)
        except self._nvml.NVMLError as error:
            log.debug("the GPU's driver does not answer", extra={"reason": str(error)})
            return
        for (name, text), value in zip(_GAUGES.items(), (rates.gpu / 100, memory.used, memory.total), strict=True):
            yield GaugeMetricFamily(name, text, value=value)

    def _open(self, uuid: str) -> None:
        try:
            import pynvml
        except ModuleNotFoundError:
            log.info("no metrics of the GPU", extra={"reason": "pip install 'penstock[gpu]'"})
            return
        try:
            pynvml.nvmlInit()
            self._gpu = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        except pynvml.NVMLError as error:
            log.warning("no metrics of the GPU", extra={"gpu": uuid, "reason": str(error)})
        self._nvml = pynvml
