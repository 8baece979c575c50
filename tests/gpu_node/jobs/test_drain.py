"""The pace at which a node completes queued jobs, in predicted cost per second."""

from __future__ import annotations

import random

import pytest

from penstock.gpu_node.jobs.drain import (
    FEW_OUTPUTS,
    LONGER,
    MAX_FEW_OUTPUTS,
    MAX_PHASE_PROMPT_TOKENS,
    PHASE_PROMPT_TOKENS,
    SHORT_PROMPT_TOKENS,
    DrainEstimator,
    JobWork,
    StepParts,
    mean_part,
    phases,
)

COSTS = StepParts(4.0, 1.0, 1.0)


def work(part: float, *, ended: bool, weight: int = 100, most: int = 1000) -> JobWork:
    return JobWork(False, 1, 1, weight, most, round(part * weight), has_ended=ended)


def mean_of(jobs: list[JobWork]) -> float:
    return mean_part(jobs)[0]


def test_before_any_output_the_mean_is_assumed() -> None:
    assert mean_part([]) == (1, 1)
    assert mean_part([work(0, ended=False)]) == (1, 1)
    assert mean_part([work(0.4, ended=False)]) == pytest.approx((1.4, 1)), (
        "what is left does not depend on what there is"
    )


def test_without_running_jobs_the_mean_is_that_of_the_ended_ones() -> None:
    assert mean_of([work(part, ended=True) for part in (0.1, 0.2, 0.6)]) == pytest.approx(0.3)
    heavy = [work(0.1, ended=True, weight=300), work(0.5, ended=True, weight=100)]
    assert mean_of(heavy) == pytest.approx(0.2), "longer outputs weigh more"
    assert mean_of([work(1.5, ended=True)]) == pytest.approx(1.5), "an output may be longer than assumed"


def test_a_running_job_counts_as_the_longer_ones_of_the_others() -> None:
    ended = [work(part, ended=True) for part in (0.1, 0.3, 0.5)] * 100
    running = [work(0.2, ended=False)] * 100
    assert mean_of([*ended, *running]) == pytest.approx((0.1 + 0.3 + 0.5 + 0.4) / 4, rel=0.02)


def test_a_first_short_answer_is_not_the_longest_of_all() -> None:
    """The job that has come the furthest ends first; what the others have left is as unknown as before."""
    others = [work(0.02, ended=False) for _ in range(30)]
    assert mean_of([work(0.05, ended=True), *others]) > 0.5
    assert mean_of([work(0.04, ended=True), work(0.05, ended=True), *others]) > 0.3


def test_a_single_end_far_ahead_of_the_others_says_little_of_them() -> None:
    """Of 64 chats that a node began one by one, six ended. One of them had come further than all that run."""
    ended = [work(tokens / 256, ended=True, weight=256) for tokens in (6, 9, 14, 18, 23, 42)]
    running = [work(at / 1.6 / 256, ended=False, weight=256) for at in range(64)]
    assert mean_of([*ended, *running]) > 0.9


def test_what_runs_once_short_outputs_have_ended_is_assumed_to_be_longer() -> None:
    jobs = [work(0.1, ended=True)] * 200 + [work(0.2, ended=False)] * 200
    assert mean_part(jobs) == pytest.approx(((0.1 + 0.2 + LONGER) / 2, LONGER / 2), rel=0.01)


def test_jobs_that_began_together_are_not_judged_by_the_shortest() -> None:
    """The mean of the ended ones would be 0.1 at a fifth of the time; what is left of the others counts as long."""
    rng = random.Random(3)
    lengths = [rng.random() for _ in range(400)]
    for now, error in (0.2, 0.7), (0.5, 0.3), (0.8, 0.1):
        seen = [work(min(now, length), ended=length <= now, weight=1000) for length in lengths]
        assert mean_of(seen) == pytest.approx(0.5, rel=error)


def test_outputs_that_are_longer_than_assumed_have_some_tokens_left() -> None:
    short, long = [work(0.1, ended=True) for _ in range(300)], [work(1.6, ended=False)] * 100
    left = 1.6
    assert mean_part([*short, *long]) == pytest.approx(((3 * 0.1 + 1.6 + left) / 4, left / 4), rel=0.02)


def test_no_output_is_assumed_beyond_the_limits_of_its_job() -> None:
    assert mean_part([work(0.9, ended=False, most=100)]) == pytest.approx((1.0, 0.1))
    assert mean_part([work(1.0, ended=False, most=100)]) == (1.0, 0.0)


def phase_ms(costs: StepParts, num_outputs: int, num_prompt: int) -> list[float]:
    return [
        costs.fixed_ms * outputs
        + costs.prompt_ms * (num_prompt if seqs > 1 else SHORT_PROMPT_TOKENS)
        + costs.decoded_ms * seqs * (outputs - 1)
        for seqs, outputs in phases(64, num_outputs)
    ]


def test_the_costs_of_steps_follow_from_the_phases() -> None:
    for costs in (COSTS, StepParts(9.0, 0.03, 0.05), StepParts(0.5, 20.0, 12.0)):
        for num_prompt, num_outputs in (
            (PHASE_PROMPT_TOKENS, FEW_OUTPUTS),
            (costs.longer_prompt(512), costs.more_outputs(64)),
        ):
            found = StepParts.measured(phase_ms(costs, num_outputs, num_prompt), 64, num_prompt, num_outputs)
            assert found.output_weight(32) * found.prompt_ms == pytest.approx(
                costs.output_weight(32) * costs.prompt_ms, rel=0.25
            )
    assert phases(2) == ((1, 9), (2, 1), (2, 5))
    assert StepParts.measured([9.0, 2.0, 6.0], 1).fixed_ms >= 0, "a node of one sequence"


def test_a_phase_that_other_work_delays_does_not_make_output_tokens_free() -> None:
    took_ms = phase_ms(COSTS, FEW_OUTPUTS, PHASE_PROMPT_TOKENS)
    took_ms[1] = took_ms[2]
    assert StepParts.measured(took_ms, 64).decoded_ms >= COSTS.decoded_ms / 2


def test_later_phases_take_long_enough_to_be_told_apart() -> None:
    for costs in (COSTS, StepParts(9.0, 0.03, 0.05), StepParts(50.0, 20.0, 12.0)):
        num_prompt, num_outputs = costs.longer_prompt(4096), costs.more_outputs(64)
        one, prompt, both = phase_ms(costs, num_outputs, num_prompt)
        assert both - prompt > 300 or num_outputs in (FEW_OUTPUTS, MAX_FEW_OUTPUTS)
        assert prompt > 150 or num_prompt in (PHASE_PROMPT_TOKENS, MAX_PHASE_PROMPT_TOKENS)
        assert one < 9 * prompt


def test_a_cold_node_has_the_pace_of_its_steps_and_a_wide_spread() -> None:
    foreground, background = DrainEstimator().paces(COSTS, 32)
    # 1,000 units of work a second. The assumed job has 128 prompt tokens, and output tokens of 1.125 units.
    assert foreground.cost_per_s == pytest.approx(1000 * 384 / (128 + 256 * 1.125))
    assert background.cost_per_s == foreground.cost_per_s
    assert foreground.spread > 0.8
    assert DrainEstimator().paces(None, 32)[0].cost_per_s == 0.0


class SteppingNode:
    """Decodes a token of each running job per step, and takes the next job when one ends."""

    def __init__(self, drain: DrainEstimator, *, slots: int = 8, step_s: float = 0.1, cost: int = 266) -> None:
        self.drain, self.slots, self.step_s, self.cost, self.now_s = drain, slots, step_s, cost, 0.0
        self.running: list[JobWork] = []
        self.cost_ended = 0

    def run(self, seconds: float, *, num_output: int = 20, waits: bool = True, background: bool = False) -> None:
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            while len(self.running) < self.slots:
                begun = self.drain.begin(
                    is_background=background, cost=self.cost, num_prompt=10, max_output=1024, num_choices=1
                )
                self.running.append(begun)
            self.now_s += self.step_s
            for job in list(self.running):
                ends = job.num_output + 1 == num_output
                self.drain.note(job, job.num_output + 1, has_ended=ends)
                if ends:
                    self.running.remove(job)
                    self.cost_ended += job.cost
            kinds = {"foreground_waits": waits and not background, "background_waits": waits and background}
            if round(self.now_s / self.step_s) % 20 == 0:
                self.drain.update(self.now_s, num_running=len(self.running), **kinds)

    @property
    def pace(self) -> float:
        return self.drain.paces(None, self.slots)[0].cost_per_s


def test_the_pace_is_the_predicted_cost_that_ends_per_second() -> None:
    node = SteppingNode(DrainEstimator())
    node.run(60)
    assert node.pace == pytest.approx(node.cost_ended / 60, rel=0.05)
    assert node.drain.paces(None, 8)[0].spread < 0.2


def test_running_jobs_count_before_any_has_ended() -> None:
    node = SteppingNode(DrainEstimator())
    node.run(4.1, num_output=1000)
    assert node.cost_ended == 0
    assert node.pace > 0


def test_what_is_measured_is_forgotten_within_half_a_minute() -> None:
    node = SteppingNode(DrainEstimator())
    node.run(60)
    node.step_s = 0.2
    before = node.drain.paces(None, 8)[0]
    node.run(30)
    after = node.drain.paces(None, 8)[0]
    assert after.cost_per_s == pytest.approx(before.cost_per_s / 2, rel=0.2)
    assert after.spread > 2 * before.spread, "a speed that has just changed is uncertain"


def test_idle_time_does_not_count() -> None:
    node = SteppingNode(DrainEstimator())
    node.run(60)
    before, node.running = node.pace, []
    for _ in range(30):
        node.now_s += 2
        node.drain.update(node.now_s, num_running=0, foreground_waits=False, background_waits=False)
    assert node.pace == before
    node.drain.update(node.now_s + 1.9, num_running=8, foreground_waits=True, background_waits=False)
    assert node.pace == before, "jobs may have come at the end of the interval"
    # Two bursts, which each waited for a moment when the pace was updated, and nothing in between.
    node.drain.update(node.now_s + 3.9, num_running=8, foreground_waits=True, background_waits=False, since_s=1e9)
    assert node.pace == before


def test_what_is_computed_counts_from_the_moment_that_jobs_begin_to_wait() -> None:
    drain = DrainEstimator()
    drain.update(0.0, num_running=0, foreground_waits=False, background_waits=False)
    job = drain.begin(is_background=False, cost=2000, num_prompt=0, max_output=2000, num_choices=1)
    drain.note(job, 150)
    drain.note_queue(1.5, foreground_waits=True, background_waits=False)
    drain.note(job, 200)
    drain.update(2.0, num_running=1, foreground_waits=True, background_waits=False, since_s=1.5)
    assert drain._kinds[False].output == 50
    assert drain._kinds[False].seconds == 0.5
    # The queue was empty in between.
    drain.note_queue(3.0, foreground_waits=False, background_waits=False)
    drain.note_queue(3.5, foreground_waits=True, background_waits=False)
    drain.note(job, 900)
    drain.update(4.0, num_running=1, foreground_waits=True, background_waits=False, since_s=3.5)
    assert drain._kinds[False].output == 50


def test_background_work_has_the_pace_that_foreground_work_leaves() -> None:
    drain = DrainEstimator()
    for second in range(60):
        for kind, tokens in ((False, 600), (True, 200)):
            job = drain.begin(
                is_background=kind, cost=tokens, num_prompt=0, max_output=tokens, num_choices=tokens // 200
            )
            drain.note(job, tokens, has_ended=True)
        drain.update(float(second), num_running=2, foreground_waits=False, background_waits=True)
    foreground, background = drain.paces(None, 2)
    assert background.cost_per_s == pytest.approx(200, rel=0.1)
    assert foreground.cost_per_s == pytest.approx(200, rel=0.1), "it has no measurement of its own"


def test_two_seconds_in_which_chats_displace_background_work_do_not_decide_its_pace() -> None:
    steps = StepParts(4.0, 1.0, 1.0)
    drain = DrainEstimator()
    for _ in range(32):
        job = drain.begin(is_background=True, cost=200, num_prompt=200, max_output=100, num_choices=1)
    drain.update(0.0, num_running=32, foreground_waits=False, background_waits=True)
    before = drain.paces(steps, 32)[1].cost_per_s
    drain.note(job, 1)
    drain.update(2.0, num_running=32, foreground_waits=False, background_waits=True, kind_seconds=(1.5, 0.5))
    beside_chats = drain.paces(steps, 32)[1].cost_per_s
    assert before / 4 < beside_chats < before / 2, "the engine gave it a quarter of its time, for two seconds"


def test_prompts_that_the_prefix_cache_has_do_not_show_a_high_pace() -> None:
    steps, drain = StepParts(4.0, 1.0, 1.0), DrainEstimator()
    drain.update(0.0, num_running=32, foreground_waits=True, background_waits=False)
    for _ in range(32):
        job = drain.begin(is_background=False, cost=300, num_prompt=200, max_output=100, num_choices=1)
        drain.note(job, 10)
    drain.update(1.0, num_running=32, foreground_waits=True, background_waits=False)
    computed, cached = (drain.paces(steps.with_cache(hit_rate), 32)[0].cost_per_s for hit_rate in (0.0, 0.95))
    assert computed == pytest.approx(300 * 32 * 0.7, rel=0.5), "prompts of 6,400 tokens in a second"
    assert cached < 0.7 * computed, "the outputs have hardly begun"


def test_tokens_of_an_earlier_node_are_not_this_nodes_work() -> None:
    drain = DrainEstimator()
    drain.update(0.0, num_running=1, foreground_waits=True, background_waits=False)
    job = drain.begin(is_background=False, cost=100, num_prompt=0, max_output=100, num_choices=1, num_logged=90)
    drain.note(job, 95)
    drain.update(1.0, num_running=1, foreground_waits=True, background_waits=False)
    assert drain._kinds[False].output == 5


def test_lengths_of_many_running_jobs_are_remembered() -> None:
    drain = DrainEstimator()
    for _ in range(1200):
        drain.begin(is_background=False, cost=10, num_prompt=1, max_output=10, num_choices=2)
    drain.update(0.0, num_running=250, foreground_waits=True, background_waits=False)
    assert len(drain._kinds[False].begun) == 1000
    assert drain._kinds[False].begun[0].longest_output == 20
