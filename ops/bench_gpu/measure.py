"""How long things take on a GPU, and what the GPU could do at best."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from penstock.runtime.process_memory import no_collection

Work = Callable[[], object]
_CALLS = 20
"""Fewest calls in a graph: the launch of the graph itself then takes less than a percent of a call of 20 µs."""
_REPLAYS = 5
_ROTATED_BYTES = 160 << 20
"""Buffers of one kernel's calls together: more than twice the L2 cache of an H200, 60 MB."""
_MAX_COPIES = 32


class Clock:
    """Times work on one device, and tracks how much of a stage's time is left."""

    def __init__(self, device: torch.device, seconds: float) -> None:
        self.device = device
        self.start(seconds)

    def start(self, seconds: float) -> None:
        """Begin a stage that may take so long."""
        self._end_s = time.monotonic() + seconds

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def left_s(self) -> float:
        return self._end_s - time.monotonic()

    def wait(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()

    def wall_ms(self, work: Work) -> float:
        """Run it once and return its time from outside, until all that it started is done."""
        self.wait()
        started_s = time.perf_counter()
        work()
        self.wait()
        return (time.perf_counter() - started_s) * 1e3

    def device_ms(self, works: Sequence[Work]) -> float:
        """Return the device time of one call: the median over replays of a graph of many calls.

        works: the same call on different buffers, which the graph cycles through. Events around single launches would
        measure how fast Python launches small kernels.
        """
        if not self.is_gpu:
            works[0]()
            return self.wall_ms(works[0])
        return self._replayed_ms(_graph_of(works), calls=_num_calls(works))

    def _replayed_ms(self, graph: Any, calls: int) -> float:
        graph.replay()
        times_ms = []
        for _ in range(_REPLAYS):
            started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            started.record()
            graph.replay()
            ended.record()
            ended.synchronize()
            times_ms.append(started.elapsed_time(ended) / calls)
        return median(times_ms)


def _num_calls(works: Sequence[Work]) -> int:
    return -(-_CALLS // len(works)) * len(works)


def _graph_of(works: Sequence[Work]) -> Any:
    """Capture calls of all works in turn. Each has run before, so that kernels are compiled."""
    for work in works:
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with no_collection(), torch.cuda.graph(graph):
        for _ in range(_num_calls(works) // len(works)):
            for work in works:
                work()
    return graph


def rotated(make: Callable[[], Work], num_bytes: int) -> list[Work]:
    """Return enough of what `make` returns, each on buffers of its own, that no call finds its bytes in the L2 cache.

    num_bytes: what one call reads and writes.
    """
    copies = min(_MAX_COPIES, max(2, -(-_ROTATED_BYTES // max(num_bytes, 1))))
    return [make() for _ in range(copies if torch.cuda.is_available() else 1)]


def ceilings(clock: Clock, *, dry: bool) -> dict[str, float | str]:
    """Measure what fractions are taken of: copied and read bytes, and operations of square products, per second."""
    size, side = (1 << 12, 32) if dry else (1 << 30, 8192)
    source = torch.zeros(size, dtype=torch.uint8, device=clock.device)
    target, numbers = torch.empty_like(source), source.view(torch.float32)
    copy_ms, read_ms = clock.device_ms([lambda: target.copy_(source)]), clock.device_ms([numbers.sum])
    dtype = torch.float32 if dry else torch.bfloat16
    a, b = (torch.randn(side, side, device=clock.device).to(dtype) for _ in range(2))
    operations = 2 * side**3 / 1e9
    found: dict[str, float | str] = {
        "device": torch.cuda.get_device_name() if clock.is_gpu else "cpu",
        "copy_gb_s": 2 * size / copy_ms / 1e6,
        "read_gb_s": size / read_ms / 1e6,
        "bf16_tflop_s": operations / clock.device_ms([lambda: a @ b]),
    }
    if clock.is_gpu and torch.cuda.get_device_capability() >= (8, 9):
        try:
            found["fp8_tflop_s"] = operations / clock.device_ms([float8_product(a, b)])
        except RuntimeError:
            # Without this ceiling, the other formats are still measured.
            traceback.print_exc()
    return found


def float8_product(a: Tensor, b: Tensor) -> Work:
    """Return the library's product of two square matrices, rounded to float8: it wants the second one by columns."""
    one, left, right = torch.ones((), device=a.device), *(x.to(torch.float8_e4m3fn) for x in (a, b))
    return lambda: torch._scaled_mm(left, right.t(), one, one, out_dtype=torch.bfloat16)


def fraction(ceilings: dict[str, Any], ms: float, num_bytes: float, num_operations: float, rate: str) -> float:
    """Return the floor of a call by its time: its bytes or operations at the measured ceiling, whichever is slower."""
    by_bytes, by_operations = num_bytes / ceilings["read_gb_s"] / 1e6, num_operations / ceilings[rate] / 1e9
    return max(by_bytes, by_operations) / ms
