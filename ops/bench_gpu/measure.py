"""How long things take on a GPU, and what the GPU could do at best."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch


class Clock:
    """Times work on one device, and says how much of the run's time is left."""

    def __init__(self, device: torch.device, seconds: float) -> None:
        self.device = device
        self._end_s = time.monotonic() + seconds

    @property
    def is_card(self) -> bool:
        return self.device.type == "cuda"

    @property
    def left_s(self) -> float:
        return self._end_s - time.monotonic()

    def wait(self) -> None:
        if self.is_card:
            torch.cuda.synchronize()

    def wall_ms(self, work: Callable[[], object]) -> float:
        """Once, from outside, with all that it started done."""
        self.wait()
        started_s = time.perf_counter()
        work()
        self.wait()
        return (time.perf_counter() - started_s) * 1e3

    def device_ms(self, work: Callable[[], object], repeats: int = 20) -> float:
        """Median by the device's own clock, after a first time that compiles."""
        work()
        if not self.is_card:
            return self.wall_ms(work)
        work()
        times_ms = []
        for _ in range(repeats):
            started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            started.record()
            work()
            ended.record()
            ended.synchronize()
            times_ms.append(started.elapsed_time(ended))
        return median(times_ms)


def limits(clock: Clock, *, dry: bool) -> dict[str, float | str]:
    """What fractions are taken of: a copy's bytes and a square product's operations per second, both measured here."""
    size, side = (1 << 12, 32) if dry else (1 << 30, 8192)
    source = torch.empty(size, dtype=torch.uint8, device=clock.device)
    target = torch.empty_like(source)
    copy_ms = clock.device_ms(lambda: target.copy_(source))
    dtype = torch.float32 if dry else torch.bfloat16
    a, b = (torch.randn(side, side, device=clock.device).to(dtype) for _ in range(2))
    product_ms = clock.device_ms(lambda: a @ b)
    name = torch.cuda.get_device_name() if clock.is_card else "cpu"
    return {
        "card": name,
        "torch": torch.__version__,
        "copy_gb_s": 2 * size / copy_ms / 1e6,
        "product_tflop_s": 2 * side**3 / product_ms / 1e9,
    }
