"""What a GPU's driver reports of it (NVML): how busy it is, and its memory."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

log = logging.getLogger(__package__)


@dataclass(frozen=True, slots=True)
class GpuLoad:
    """The load of one GPU, by all processes."""

    utilization: float
    """Share of the driver's last sample period in which a kernel ran on the GPU."""
    memory_used_bytes: int
    memory_total_bytes: int


class GpuDriver:
    """Reads the load of one GPU. A read takes about a millisecond; safe on any thread.

    The package nvidia-ml-py (extra `gpu`) is imported at the first read, and only on a node with a GPU.
    """

    def __init__(self) -> None:
        self._nvml: Any = None
        self._gpu: Any = None
        self._is_opened = False

    def read(self, uuid: str) -> GpuLoad | None:
        """Return the load of the GPU with this UUID; None for an empty UUID, and while the driver fails."""
        if not uuid:
            return None
        if not self._is_opened:
            self._is_opened = True
            self._open(uuid)
        if self._gpu is None:
            return None
        try:
            rates = self._nvml.nvmlDeviceGetUtilizationRates(self._gpu)
            memory = self._nvml.nvmlDeviceGetMemoryInfo(self._gpu)
        except self._nvml.NVMLError as error:
            log.debug("the GPU's driver does not answer", extra={"reason": str(error)})
            return None
        return GpuLoad(rates.gpu / 100, memory.used, memory.total)

    def _open(self, uuid: str) -> None:
        try:
            import pynvml
        except ModuleNotFoundError:
            log.info("the load of the GPU is unknown", extra={"reason": "pip install 'penstock[gpu]'"})
            return
        try:
            pynvml.nvmlInit()
            self._gpu = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        except pynvml.NVMLError as error:
            log.warning("the load of the GPU is unknown", extra={"gpu": uuid, "reason": str(error)})
        self._nvml = pynvml
