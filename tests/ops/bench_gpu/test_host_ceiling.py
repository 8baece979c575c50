"""The host's part of a GPU step is short: `GpuRunner.submit` with launches stubbed, in CPU time of its thread."""

from __future__ import annotations

import pytest
from bench_gpu.without_gpu.host_ceiling import TARGET_US, measure_us, plans


@pytest.mark.slow
def test_submitting_a_step_of_256_rows_takes_less_than_a_millisecond() -> None:
    runner, steps = plans()
    taken = {name: measure_us(runner, plan, repeats=100) for name, plan in steps.items()}
    assert {name: times for name, times in taken.items() if times[0] > TARGET_US} == {}
