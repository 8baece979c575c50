"""Histograms: values in buckets, and sums of histograms."""

from __future__ import annotations

import pytest

from penstock.runtime.histogram import Histogram, sum_of


def test_a_value_counts_in_the_first_bucket_that_holds_it() -> None:
    found = Histogram((0.5, 1.0, 10.0))
    for value in (0.0, 0.5, 0.6, 9.0, 1000.0):
        found.note(value)
    assert found.counts == [2, 1, 1, 1]
    assert found.total == pytest.approx(1010.1)
    assert found.buckets == [("0.5", 2), ("1.0", 3), ("10.0", 4), ("+Inf", 5)]


def test_a_sum_has_the_values_of_all_and_changes_none() -> None:
    one, other = Histogram((1, 2)), Histogram((1, 2))
    one.note(1)
    other.note(5)
    whole = sum_of((one, other))
    whole.note(2)
    assert (whole.counts, whole.total) == ([1, 1, 1], 8)
    assert (one.counts, one.total) == ([1, 0, 0], 1)
