"""The choice between the two ways of preemption, by measured costs."""

from __future__ import annotations

import pytest

from penstock.gpu_node.engine.scheduler.preemption import SwapCost

MIB = 1 << 20


def _measured(copied_mib_per_ms: float, tokens_per_ms: float) -> SwapCost:
    costs = SwapCost("auto", MIB)
    for _ in range(50):
        costs.note_copies(10, 10 / copied_mib_per_ms)
        costs.note_forward(100, 100 / tokens_per_ms)
    return costs


@pytest.mark.parametrize(("copied_mib_per_ms", "swaps"), [(4.0, True), (1.5, False)])
def test_cheaper_of_swap_and_recompute_is_chosen(copied_mib_per_ms: float, swaps: bool) -> None:
    """20 blocks out and in again are 40 MiB; 160 tokens at 10 a millisecond take 16 ms."""
    assert _measured(copied_mib_per_ms, 10.0).prefers_swap(20, 160) == swaps


def test_rates_follow_the_newest_measurements() -> None:
    costs = _measured(4.0, 10.0)
    for _ in range(50):
        costs.note_forward(100, 1.0)
    assert not costs.prefers_swap(20, 160)


def test_steps_that_measure_no_rate_do_not_change_it() -> None:
    costs = _measured(4.0, 10.0)
    costs.note_copies(0, 0.0)
    costs.note_forward(1, 1000.0)
    assert costs.prefers_swap(20, 160)


def test_settings_override_the_measured_costs() -> None:
    for _ in range(2):
        assert SwapCost("swap", MIB).prefers_swap(10**6, 1)
        assert not SwapCost("recompute", MIB).prefers_swap(1, 10**6)
