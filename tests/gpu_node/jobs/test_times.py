"""The times of jobs in the last hour, which a node reports with its heartbeats."""

from __future__ import annotations

from penstock.contract.pool import JOB_TIMES
from penstock.gpu_node.jobs.times import HOUR_S, SAMPLE_S, JobMetrics, JobTimes


def taken(metrics: JobMetrics, wait_s: float, priority: int = 0) -> None:
    metrics.taken(priority, JobTimes(submitted_s=0.0, taken_s=wait_s, is_new=True))


def test_a_wait_far_beyond_the_admitted_limit_counts_for_foreground_jobs_of_its_class() -> None:
    metrics = JobMetrics()
    metrics.max_waits_s = (10.0, 60.0, 900.0)
    for priority, wait_s, is_background in (
        (0, 14, False),
        (0, 16, False),
        (1, 89, False),
        (1, 91, False),
        (2, 9999, True),
    ):
        times = JobTimes(submitted_s=0.0, taken_s=float(wait_s), is_new=True)
        metrics.taken(priority, times, is_background=is_background)
    assert [one.waits_beyond_limit for one in metrics.classes] == [1, 1, 0]


def test_the_last_hour_has_what_came_in_it_over_all_classes() -> None:
    metrics = JobMetrics()
    taken(metrics, 0.001)
    assert metrics.times_of_hour(0.0)["queue_s"][:3] == (1, 0, 0)
    for minute in range(1, 100):
        taken(metrics, 0.007, priority=minute % 3)
        found = metrics.times_of_hour(SAMPLE_S * minute)
        # The first job is in the report until an hour has passed.
        assert found["queue_s"][:2] == (int(minute < 60), min(minute, 60))
    assert metrics.times_of_hour(SAMPLE_S * 99 + 2 * HOUR_S)["queue_s"][:2] == (0, 0)
    assert {name: len(counts) for name, counts in found.items()} == {
        name: len(bounds) + 1 for name, bounds in JOB_TIMES.items()
    }
