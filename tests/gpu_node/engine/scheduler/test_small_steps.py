"""A tenant with few sequences gets steps of its own where the steps of all take long, and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from fakes.cover import examples
from fakes.policy_bench import AGING_MS
from fakes.schedules import check_plan, new_sequence
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.gpu_node.engine.kv_cache.manager import KvCacheManager
from penstock.gpu_node.engine.policy.by_policy import ByPolicy
from penstock.gpu_node.engine.scheduler.budget import MAX_SLOWDOWN, StepLimits, StepWork
from penstock.gpu_node.engine.scheduler.scheduler import LearnedTimes, Scheduler
from penstock.gpu_node.engine.steps import Step
from penstock.gpu_node.model.protocol import StepResult
from penstock.queue.policy import PolicyConfig, PolicyName

NUM_STEPS = 300
BUDGET = 256


@dataclass
class Ran:
    """The steps of a run: their times in milliseconds, and how many tokens of each tenant they sampled."""

    times_ms: list[float] = field(default_factory=list)
    counts: list[dict[str, int]] = field(default_factory=list)

    def per_token_ms(self, tenant: str, num_seqs: int) -> float:
        """Return the average time between two tokens of one of the tenant's sequences."""
        return sum(self.times_ms) * num_seqs / sum(counts.get(tenant, 0) for counts in self.counts)


def _run(
    tenants: dict[str, int],
    fixed_ms: float,
    decoded_ms: float,
    *,
    policy: PolicyName = "fair",
    weights: dict[str, float] | None = None,
) -> Ran:
    """Run sequences of each tenant on a machine whose steps take `fixed_ms`, and `decoded_ms` for each token.

    The machine has run steps of many sizes before.
    """
    limits = StepLimits(
        block_size=4, max_num_seqs=64, max_num_batched_tokens=BUDGET, max_prefill_beside_decode=64, max_model_len=2048
    )
    times = LearnedTimes("recompute", 1)
    for num_decoded in (1, 64, 8, 32) * 50:
        times.step_time.note(StepWork(num_decoded, 0, 0, 0), fixed_ms + decoded_ms * num_decoded)
    order = ByPolicy(PolicyConfig(policy, AGING_MS, 0), lambda: 0.0)
    scheduler = Scheduler(KvCacheManager(64 * 512), limits, times, policy=order)
    for number, (tenant, num_seqs) in enumerate(tenants.items()):
        for i in range(num_seqs):
            seq = new_sequence(f"{tenant}-{i}", 4, 2000, first_token=1000 * (64 * number + i))
            seq.tenant, seq.weight = tenant, (weights or {}).get(tenant, 1.0)
            order.added(seq)
            scheduler.add(seq)
    ran = Ran()
    for number in range(NUM_STEPS):
        step = scheduler.schedule()
        assert step is not None
        check_plan(scheduler, step, BUDGET)
        took_ms = fixed_ms + decoded_ms * step.num_tokens
        _complete(scheduler, times, step, took_ms)
        if number > NUM_STEPS // 3:  # The first steps compute the prompts.
            ran.times_ms.append(took_ms)
            ran.counts.append({name: sum(seq.tenant == name for seq in step.sampled_seqs) for name in tenants})
    scheduler.check_integrity()
    return ran


def _complete(scheduler: Scheduler, times: LearnedTimes, step: Step, took_ms: float) -> None:
    tokens = np.full(len(step.sampled), 7, np.int32)
    scheduler.commit(step, tokens)
    times.note_step(step, StepResult(tokens, forward_ms=took_ms, sample_ms=0.0), num_scored=0, whole_ms=took_ms)


@settings(max_examples=examples(30), deadline=None)
@given(
    others=st.lists(st.integers(1, 56), min_size=1, max_size=4).filter(lambda counts: sum(counts) < 60),
    num_own=st.integers(1, 4),
    fixed_ms=st.floats(0.5, 20),
    decoded_ms=st.floats(0.01, 3),
)
def test_a_tenants_time_between_tokens_is_bounded_by_its_time_alone(
    others: list[int], num_own: int, fixed_ms: float, decoded_ms: float
) -> None:
    tenants = {"own": num_own} | {f"other-{i}": count for i, count in enumerate(others)}
    ran = _run(tenants, fixed_ms, decoded_ms)
    alone_ms = fixed_ms + decoded_ms * num_own
    full_ms = fixed_ms + decoded_ms * sum(tenants.values())
    bound_ms = MAX_SLOWDOWN * len(tenants) * alone_ms
    # Small tenants share their steps.
    num_small = sum(count for count in tenants.values() if fixed_ms + decoded_ms * count <= 1.2 * alone_ms)
    together_ms = 2 * (fixed_ms + decoded_ms * max(num_small, num_own))
    assert ran.per_token_ms("own", num_own) <= 1.2 * max(bound_ms, together_ms)
    largest = max(tenants, key=lambda name: tenants[name])
    assert ran.per_token_ms(largest, tenants[largest]) <= 2.2 * full_ms, "small steps take at most half of the time"


def test_one_sequence_beside_many_decodes_in_steps_of_its_own() -> None:
    ran = _run({"own": 1, "flood": 60}, 3.0, 0.7)
    assert ran.per_token_ms("own", 1) < 1.15 * MAX_SLOWDOWN * 2 * 3.7 < 3.0 + 0.7 * 61
    assert ran.per_token_ms("flood", 60) < 1.4 * (3.0 + 0.7 * 61)


def test_a_heavier_tenant_gets_more_steps_of_its_own() -> None:
    light, heavy = (_run({"own": 1, "flood": 60}, 3.0, 2.0, weights={"own": weight}) for weight in (1.0, 3.0))
    assert heavy.per_token_ms("own", 1) < 0.8 * light.per_token_ms("own", 1)


@pytest.mark.parametrize(
    ("tenants", "decoded_ms", "policy"),
    [
        ({"own": 1, "flood": 60}, 0.02, "fair"),
        ({"flood": 61}, 2.0, "fair"),
        ({"one": 20, "two": 20}, 2.0, "fair"),
        ({"own": 1, "flood": 60}, 2.0, "priority"),
    ],
    ids=["large steps take no longer", "one tenant", "equal tenants", "no shares"],
)
def test_all_sequences_decode_in_every_step(tenants: dict[str, int], decoded_ms: float, policy: PolicyName) -> None:
    assert all(counts == tenants for counts in _run(tenants, 3.0, decoded_ms, policy=policy).counts)
