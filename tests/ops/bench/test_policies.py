"""Each policy has its effect on a simulated node: shorter completions, interactive jobs at once, fair shares."""

from __future__ import annotations

from statistics import mean

from bench.policies.loads import LOADS
from bench.policies.node import SimulationResult, simulate

from penstock.queue.policy import PolicyName


def run(load: str, name: PolicyName, num_seeds: int = 2) -> list[SimulationResult]:
    return [simulate(name, LOADS[load](seed)) for seed in range(num_seeds)]


def test_shortest_first_completes_in_four_fifths_of_the_mean_time() -> None:
    for shortest, first_come in zip(run("lengths", "sjf", 1), run("lengths", "fcfs", 1), strict=True):
        assert shortest.mean_completion <= 0.8 * first_come.mean_completion


def test_shortest_first_is_not_misled_by_jobs_that_outlive_their_prediction() -> None:
    (shortest,), (first_come,) = run("two kinds", "sjf", 1), run("two kinds", "fcfs", 1)
    assert shortest.mean_completion <= 0.7 * first_come.mean_completion


def test_interactive_work_does_not_wait_for_batch_work() -> None:
    preemptive: tuple[PolicyName, ...] = ("priority", "sjf", "fair")
    for stats in (run("classes", name, 1) for name in preemptive):
        assert max(one.ttft_p99["interactive"] for one in stats) < 100
        assert all(one.preemptions for one in stats)
    assert min(one.ttft_p99["interactive"] for one in run("classes", "fcfs", 1)) > 1000


def test_fair_policy_serves_every_tenant_equally() -> None:
    assert min(stats.jain for stats in run("tenants", "fair")) > 0.95
    assert mean(stats.jain for stats in run("tenants", "fcfs")) < 0.5


def test_a_flood_of_interactive_work_does_not_starve_a_standard_tenant() -> None:
    (fair,), (strict,) = run("flood", "fair", 1), run("flood", "priority", 1)
    assert fair.ttft_p99["standard"] < 1000 < 10_000 < strict.ttft_p50["standard"]
    assert fair.ttft_p50["interactive"] < 1.5 * strict.ttft_p50["interactive"]
