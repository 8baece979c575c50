"""Rates in the pressure record."""

from __future__ import annotations

import pytest

from penstock.gpu_node.heartbeat import Gauge


def test_a_rate_follows_the_counter_and_survives_idle_times() -> None:
    gauge = Gauge(0.0)
    assert gauge.update(100, 2.0) == pytest.approx(50)
    assert gauge.update(100, 60.0) == pytest.approx(50), "nothing gained, nothing learned"
    for second in range(61, 200):
        rate = gauge.update(100 + (second - 60) * 10, float(second))
    assert rate == pytest.approx(10, rel=0.01)


def test_a_time_that_does_not_count_leaves_the_rate_and_is_not_made_up_for() -> None:
    gauge = Gauge(0.0)
    assert gauge.update(5, 10.0, counts=False) == 0
    assert gauge.update(105, 12.0) == pytest.approx(50)


def test_a_rate_of_what_should_not_happen_fades_when_it_does_not() -> None:
    gauge = Gauge(0.0, keeps=False)
    assert gauge.update(100, 2.0) == pytest.approx(50)
    assert gauge.update(100, 12.0) == pytest.approx(25), "half of it is gone after ten seconds"
