"""A node's metrics of its GPU. No test machine has one, so the driver's library is replaced at its boundary."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.gpu_node.gpus import GpuDriver
from penstock.gpu_node.monitor.metrics import gpu_metrics

GPU = "GPU-6d1f5a2e-0000-4000-8000-000000000001"


class DriverError(Exception):
    """What the library raises."""


class FakeNvml(SimpleNamespace):
    """The functions of pynvml that a node calls, for a machine with one GPU."""

    NVMLError = DriverError

    def __init__(self) -> None:
        super().__init__(num_inits=0, is_lost=False)

    def nvmlInit(self) -> None:  # noqa: N802
        self.num_inits += 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if uuid != GPU:
            raise DriverError("Not Found")
        return "the handle"

    def nvmlDeviceGetUtilizationRates(self, gpu: str) -> Any:  # noqa: N802
        if self.is_lost:
            raise DriverError("GPU is lost")
        return SimpleNamespace(gpu=37, memory=12)

    def nvmlDeviceGetMemoryInfo(self, gpu: str) -> Any:  # noqa: N802
        return SimpleNamespace(used=3 << 30, total=80 << 30, free=77 << 30)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def values(driver: GpuDriver, uuid: str) -> dict[str, float]:
    load = driver.read(uuid)
    return {} if load is None else {one.name: one.value for family in gpu_metrics(load) for one in family.samples}


def test_use_and_memory_of_the_gpu_are_read_at_each_scrape(nvml: FakeNvml) -> None:
    driver = GpuDriver()
    wanted = {
        "penstock_gpu_utilization_ratio": 0.37,
        "penstock_gpu_memory_used_bytes": 3 << 30,
        "penstock_gpu_memory_total_bytes": 80 << 30,
    }
    assert [values(driver, GPU) for _ in range(2)] == [wanted, wanted]
    assert nvml.num_inits == 1
    nvml.is_lost = True
    assert values(driver, GPU) == {}
    nvml.is_lost = False
    assert values(driver, GPU) == wanted


def test_unknown_gpu_has_no_series(nvml: FakeNvml) -> None:
    assert values(GpuDriver(), "GPU-other") == {}


def test_machine_without_a_driver_has_no_series() -> None:
    """The real library."""
    pytest.importorskip("pynvml")
    assert values(GpuDriver(), GPU) == {}


def test_missing_package_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert values(GpuDriver(), GPU) == {}


def test_node_without_a_gpu_does_not_import_the_library() -> None:
    code = (
        "import sys; from penstock.gpu_node.gpus import GpuDriver; print(GpuDriver().read(''), 'pynvml' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["None", "False"]
