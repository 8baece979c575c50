"""A plan's sampling options for each row, while rows come and go."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np

from penstock.contract.job import SamplingParams
from penstock.gpu_node.engine.kv_cache.manager import KvCacheManager
from penstock.gpu_node.engine.scheduler.budget import StepLimits
from penstock.gpu_node.engine.scheduler.scheduler import LearnedTimes, Scheduler
from penstock.gpu_node.engine.sequence import Sequence
from penstock.gpu_node.engine.text.output import EndRule
from penstock.gpu_node.model.protocol import StepPlan

END_IDS = frozenset((7, 3))
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.5, "top_k": 4, "top_p": 0.9, "min_p": 0.1, "seed": 5},
    {"repetition_penalty": 1.5},
    {"presence_penalty": -1.0, "min_tokens": 2},
    {"frequency_penalty": 0.5, "top_k": -1},
]


def _sequence(number: int, kind: dict[str, Any], max_tokens: int = 8) -> Sequence:
    return Sequence(
        request_id=str(number),
        choice=number % 3,
        params=SamplingParams(**kind),
        seed=1 << 63 | number,
        token_ids=np.arange(10 * number, 10 * number + number + 2, dtype=np.int32),
        num_prompt_tokens=number + 1,  # the last token was generated elsewhere
        end_rule=EndRule(END_IDS, kind.get("min_tokens", 0), max_tokens),
    )


def _scheduler(max_num_seqs: int = 8) -> Scheduler:
    limits = StepLimits(
        block_size=4,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=64,
        max_prefill_beside_decode=64,
        max_model_len=40,
    )
    return Scheduler(KvCacheManager(200), limits, LearnedTimes("recompute", 0))


def _step(scheduler: Scheduler, token: int = 500) -> tuple[list[str], StepPlan]:
    step = scheduler.schedule()
    assert step is not None
    plan = scheduler.plan(step)
    scheduler.commit(step, np.full(len(step.sampled), token, dtype=np.int32))
    return [seq.request_id for seq in step.sampled_seqs], plan


def test_each_row_samples_by_its_own_parameters() -> None:
    scheduler = _scheduler()
    for number, kind in enumerate(KINDS):
        scheduler.add(_sequence(number, kind))
    for at in range(3):
        names, plan = _step(scheduler)
        rows = plan.sampling
        assert names == ["0", "1", "2", "3", "4"]
        for number, kind in enumerate(KINDS):
            seq = _sequence(number, kind)
            for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"):
                assert getattr(rows, name)[number] == np.float32(getattr(seq.params, name))
            assert rows.frequency_penalty[number] == seq.params.frequency_penalty
            assert rows.top_k[number] == max(seq.params.top_k, 0)
            assert (rows.seed[number], rows.choice[number], rows.position[number]) == (seq.seed, number % 3, 1 + at)
            seen = [*seq.token_ids.tolist(), *[500] * at] if number >= 2 else []
            assert rows.seen[number].tolist() == seen
            assert rows.num_seen_prompt[number] == (number + 1 if number >= 2 else 0)
            assert rows.banned[number].tolist() == ([3, 7] if number == 3 and at == 0 else [])


def test_plans_share_their_settings_until_the_batch_changes() -> None:
    scheduler = _scheduler()
    for number in range(2):
        scheduler.add(_sequence(number, {}))
    first, second = (_step(scheduler)[1].sampling for _ in range(2))
    assert second.temperature is first.temperature and second.seed is first.seed
    scheduler.add(_sequence(2, {}))
    assert len(_step(scheduler)[1].sampling.temperature) == 3


def test_reused_row_keeps_nothing_of_its_former_sequence() -> None:
    scheduler = _scheduler(max_num_seqs=1)
    scheduler.add(_sequence(3, KINDS[3], max_tokens=2))
    scheduler.add(_sequence(0, KINDS[0]))
    (first, _), (second, plan) = _step(scheduler), _step(scheduler)
    assert (first, second) == (["3"], ["0"])
    assert plan.sampling.presence_penalty.tolist() == [0.0] and plan.sampling.temperature.tolist() == [0.0]
    assert [len(ids) for ids in (*plan.sampling.seen, *plan.sampling.banned)] == [0, 0]
    assert plan.token_ids.tolist() == [0, 1] and plan.block_tables.shape == (1, 1)


def test_nothing_in_a_plan_changes_while_its_step_runs() -> None:
    scheduler = _scheduler()
    seqs = [_sequence(number, kind) for number, kind in enumerate(KINDS)]
    for seq in seqs:
        scheduler.add(seq)
    _step(scheduler)
    step = scheduler.schedule()
    assert step is not None
    plan = scheduler.plan(step)
    kept = [np.copy(array) for array in _arrays(plan)]
    scheduler.remove(seqs[1])
    scheduler.remove(seqs[4])
    scheduler.add(_sequence(5, KINDS[2]))
    assert all(np.array_equal(now, then) for now, then in zip(_arrays(plan), kept, strict=True))


def _arrays(plan: StepPlan) -> list[np.ndarray[Any, Any]]:
    parts = [getattr(plan, field.name) for field in fields(plan) if field.name != "sampling"]
    for field in fields(plan.sampling):
        value = getattr(plan.sampling, field.name)
        parts += value if isinstance(value, tuple) else [value]
    return parts
