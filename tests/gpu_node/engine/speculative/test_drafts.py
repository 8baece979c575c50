"""Drafts change how many steps an answer takes, and nothing else in it."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, cast

import numpy as np
import pytest
from fakes.cover import examples
from fakes.engine_runs import check_idle, drain
from fakes.oracle import Oracle
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.contract.job import SamplingParams
from penstock.contract.output import TokenLogprobs
from penstock.contract.sampling import StructuredOutputs
from penstock.gpu_node.engine import Engine, EngineConfig, ResumedChoice, StepOutput
from penstock.gpu_node.engine.records import EngineRequest
from penstock.gpu_node.engine.speculative.draft_cost import StepCost
from penstock.gpu_node.engine.speculative.drafter import Drafter, NgramDrafter
from penstock.gpu_node.engine.speculative.drafts import DraftBudget, speculation_of
from penstock.gpu_node.model.protocol import ModelRunner, StateSizes, StepHandle, StepPlan, StepResult

MakeEngine = Callable[..., Engine]
Submit = Callable[[StepPlan], StepHandle]
Likely = list[TokenLogprobs]
ParsedText = dict[tuple[str, int], tuple[list[int], str, str | None, Likely, Likely]]
TIGHT: dict[str, Any] = {"max_num_seqs": 6, "num_kv_blocks": 14, "num_swap_blocks": 10, "max_num_batched_tokens": 48}

options = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.0, 1.0]), "seed": st.integers(0, 9), "n": st.sampled_from([1, 1, 1, 3])},
    optional={
        "repetition_penalty": st.just(1.3),
        "frequency_penalty": st.just(0.7),
        "logit_bias": st.just({5: 3.0, 7: -4.0}),
        "bad_words": st.just(("th", "e")),
        "min_tokens": st.integers(0, 20),
        "stop": st.sampled_from([("e",), ("th", "ate")]),
        "stop_token_ids": st.just(tuple(range(3, 60))),
        "ignore_eos": st.booleans(),
        "logprobs": st.integers(0, 3),
        "prompt_logprobs": st.integers(0, 2),
    },
)
guided = st.fixed_dictionaries(
    {"temperature": st.just(1.0), "structured_outputs": st.just(StructuredOutputs(regex="[a-z]{1,30}"))}
)
requests = st.lists(
    st.tuples(st.lists(st.integers(3, 12), min_size=1, max_size=40), st.integers(20, 45), options | guided),
    min_size=1,
    max_size=7,
)


@pytest.fixture(scope="module")
def plain(make_engine: MakeEngine) -> Engine:
    """An engine without drafts, with blocks for all sequences."""
    return make_engine(runner="native", dtype="bfloat16")


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    """A drafting policy that knows the coming tokens."""
    return Oracle()


@pytest.fixture(scope="module")
def drafting(make_engine: MakeEngine, oracle: Oracle) -> Engine:
    """An engine that drafts as much as possible, with a KV cache far too small."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.gpu_node.engine.engine.speculation_of", lambda *_: oracle)
        return make_engine(runner="native", dtype="bfloat16", **TIGHT)


def _add(engine: Engine, wanted: list[tuple[list[int], int, dict[str, Any]]]) -> None:
    for i, (prompt, max_tokens, given_options) in enumerate(wanted):
        engine.add(EngineRequest(str(i), prompt, SamplingParams(max_tokens=max_tokens, **given_options), seed=i))


def _said(outputs: list[StepOutput]) -> ParsedText:
    said: ParsedText = {}
    for output in outputs:
        tokens, text, _, likely, of_prompt = said.setdefault((output.request_id, output.choice), ([], "", None, [], []))
        assert output.position == len(tokens)
        said[output.request_id, output.choice] = (
            [*tokens, *output.token_ids],
            text + output.text,
            output.finish_reason,
            [*likely, *output.logprobs],
            [*of_prompt, *output.prompt_logprobs],
        )
    return _by_request(said)


def _by_request(said: ParsedText) -> ParsedText:
    """The prompt's come with whichever choice is first."""
    for request_id in {request_id for request_id, _ in said}:
        own = sorted(key for key in said if key[0] == request_id)
        of_prompt = [entry for key in own for entry in said[key][4]]
        for key in own:
            said[key] = (*said[key][:4], of_prompt)
    return said


def _run(engine: Engine) -> ParsedText:
    outputs = []
    try:
        while engine.has_work():
            outputs += engine.step()
            engine.check_integrity()
    finally:
        for i in range(10):
            engine.abort(str(i))
    check_idle(engine)
    return _said(outputs)


@settings(max_examples=examples(60), suppress_health_check=list(HealthCheck))
@given(wanted=requests, luck=st.integers(0, 1000))
def test_drafts_change_no_answer(
    plain: Engine, drafting: Engine, oracle: Oracle, wanted: list[tuple[list[int], int, dict[str, Any]]], luck: int
) -> None:
    _add(plain, wanted)
    want = _run(plain)
    oracle.rng = random.Random(luck)
    oracle.texts = [[*wanted[int(name)][0], *tokens] for (name, _), (tokens, *_) in want.items()]
    _add(drafting, wanted)
    assert _run(drafting) == want


def test_drafts_are_accepted_and_save_steps(plain: Engine, drafting: Engine, oracle: Oracle) -> None:
    before = drafting.stats()
    wanted = [([5, 6, 7, i], 40, {"temperature": 1.0, "ignore_eos": True}) for i in range(3, 6)]
    _add(plain, wanted)
    want = _run(plain)
    oracle.texts = [[*wanted[int(name)][0], *tokens] for (name, _), (tokens, *_) in want.items()]
    _add(drafting, wanted)
    assert _run(drafting) == want
    stats = drafting.stats()
    assert stats.decode_tokens - before.decode_tokens == 120
    assert stats.steps - before.steps < 35
    assert 60 < stats.accepted_tokens - before.accepted_tokens < stats.drafted_tokens - before.drafted_tokens


@pytest.mark.parametrize("num_logged", [1, 7, 30])
def test_answer_that_another_node_began_continues_exactly_with_drafts(
    plain: Engine, drafting: Engine, oracle: Oracle, num_logged: int
) -> None:
    prompt, params = [5, 6, 7, 5, 6], SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True, min_tokens=40)
    plain.add(EngineRequest("x", prompt, params, seed=3))
    want, *_ = _run(plain)["x", 0]
    oracle.texts = [[*prompt, *want]]
    drafting.add(EngineRequest("x", prompt, params, seed=3, resume=[ResumedChoice(tuple(want[:num_logged]), "", None)]))
    outputs = drain(drafting)
    assert [token for output in outputs for token in output.token_ids] == want[num_logged:]
    check_idle(drafting)


@pytest.mark.parametrize(("runner", "dtype"), [("native", "bfloat16"), ("torch", "float32")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_change_no_answer_of_eight_concurrent_requests(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, runner: str, dtype: str, temperature: float
) -> None:
    monkeypatch.setattr(DraftBudget, "needs", lambda self, num, most: [0.0] * min(most, num * self.max_draft_tokens))
    engines = [make_engine(runner=runner, dtype=dtype, speculative=name) for name in ("off", "ngram")]
    prompts = [[*range(3, 20), *range(3, 8)], [9, 8, 9, 8, 9], [40], *([i, 7, 8, 9, i] for i in range(20, 25))]
    likely = {7: 20.0, 8: 19.5, 9: 19.0}
    params = SamplingParams(temperature=temperature, max_tokens=60, ignore_eos=True, logit_bias=likely)
    for engine in engines:
        for i, prompt in enumerate(prompts):
            engine.add(EngineRequest(str(i), prompt, params, seed=i))
    want, got = (_run(engine) for engine in engines)
    assert got == want
    assert engines[0].stats().drafted_tokens == 0
    assert engines[1].stats().accepted_tokens > 50
    assert engines[1].stats().steps < engines[0].stats().steps


def test_tokens_after_the_longest_earlier_run_are_drafted() -> None:
    rng = np.random.default_rng(0)
    for alphabet in (2, 5, 300):
        tokens = rng.integers(0, alphabet, 400).astype(np.int32)
        lookup = NgramDrafter(400)
        at = num_asked = num_found = 0
        while at < len(tokens):
            step = int(rng.choice([1, 2, 5, 60]))
            lookup.extend(tokens[at : at + step])
            at = min(at + step, len(tokens))
            found, size = lookup.find()
            so_far = tokens[:at].tolist()
            wanted = [place for size in (4, 3, 2) if (place := _last_place(so_far, size))]
            num_asked, num_found = num_asked + 1, num_found + (found == (wanted[0] if wanted else 0))
            if found:
                assert so_far[found - size : found] == so_far[-size:]
        assert num_found >= 0.9 * num_asked  # the others share a place with one that was seen later


def _last_place(tokens: list[int], size: int) -> int:
    tail = tokens[-size:]
    return next((at for at in range(len(tokens) - 1, size - 1, -1) if tokens[at - size : at] == tail), 0)


def test_draft_repeats_a_loop_past_the_last_token() -> None:
    lookup = NgramDrafter(50)
    lookup.extend(np.array([1, 2, 3] * 4, np.int32))
    at, _ = lookup.find()
    assert lookup.following(at, 7) == [1, 2, 3, 1, 2, 3, 1]


def _drafts(drafter: Drafter, said: list[int], least: float = 0.5) -> list[bool]:
    """Whether it had hopes behind each of the tokens."""
    return [drafter.look(np.array([token], np.int32), least) for token in said]


def test_a_sequence_learns_whether_its_drafts_are_right_without_drafting() -> None:
    drafter, rng = DraftBudget(8, StepCost()).drafter(2000), random.Random(0)
    misleading = [token for _ in range(60) for token in (5, 6, 7, 8, rng.randrange(100, 10**6))]
    hopes = _drafts(drafter, misleading)
    assert any(hopes[:60])
    behind_the_run = hopes[3::5]
    assert not any(behind_the_run[-20:])
    assert all(_drafts(drafter, [1, 2, 3] * 20)[-30:])
    assert drafter.draft(4) == [1, 2, 3, 1]
    assert drafter.chances(8)[-1] > 0.5


@given(
    st.lists(st.lists(st.floats(0.05, 1), max_size=4).map(lambda own: sorted(own, reverse=True)), max_size=4),
    st.lists(st.floats(0, 8), min_size=1, max_size=12),
)
def test_chosen_drafts_have_the_largest_expected_gain(chances: list[list[float]], needs: list[float]) -> None:
    counts = DraftBudget(4, StepCost()).choose(chances, needs)

    def gain(counts: Items[int]) -> float:
        stand = sum(sum(own[:count]) for own, count in zip(chances, counts, strict=True))
        return stand - needs[sum(counts) - 1] if sum(counts) else 0.0

    possible = (each for each in product(*(range(len(own) + 1) for own in chances)) if sum(each) <= len(needs))
    assert sum(counts) <= len(needs)
    assert gain(counts) == pytest.approx(max(map(gain, possible)))


def _step_ms(num_rows: int) -> float:
    """Return the time of a step on a machine that computes rows in tiles of eight."""
    return 8.0 + 2.0 * -(-num_rows // 8)


def _experience(cost: StepCost, rng: random.Random, num_steps: int, *, slow: float = 1.0) -> None:
    for _ in range(num_steps):
        num_drafted = rng.choice([0, 0, 1, 2, 3, 5, 8, 9, 12])
        noise = slow * rng.uniform(0.97, 1.06) * rng.choice([1.0] * 9 + [5.0])
        cost.note(8, num_drafted, noise * _step_ms(8 + num_drafted), slow * (0.3 + 0.1 * (num_drafted > 0)))


def test_cost_of_rows_is_learned_by_tile_despite_noise() -> None:
    for seed in range(5):
        rng, cost = random.Random(seed), StepCost()
        for slow in (1.0, 3.0, 1.0):  # others come and go
            _experience(cost, rng, 400, slow=slow)
            needs = cost.needs(8, 12)
            within_a_tile = 8 * (2.0 + 0.1) / 10.3
            assert needs[0] == pytest.approx(needs[7], rel=0.25)
            assert 1.5 * within_a_tile < needs[3] < 2.5 * within_a_tile
            assert needs[8] > 1.5 * needs[7]


@given(st.lists(st.tuples(st.integers(1, 70), st.integers(0, 30), st.floats(0, 1e6)), max_size=60), st.integers(1, 99))
def test_needs_are_valid_for_any_step_times(steps: list[tuple[int, int, float]], num_seqs: int) -> None:
    cost = StepCost()
    for num_running, num_drafted, ms in steps:
        for _ in range(3):
            cost.note(num_running, num_drafted, ms, ms - 1.0)
    needs = cost.needs(num_seqs, 64)
    assert len(needs) <= 64
    assert all(need >= 0 for need in needs)
    assert not needs or needs[-1] < len(needs)


def test_unknown_numbers_of_rows_are_tried_once_plain_steps_are_known() -> None:
    cost = StepCost()
    assert cost.needs(8, 64) == []
    for _ in range(20):
        cost.note(8, 0, 10.0, 0.3)
    tried = cost.needs(8, 64)
    assert set(tried) == {0.0}
    assert len(tried) < 8, "but with few at first"
    for _ in range(40):
        cost.note(8, 1, 20.0, 0.3)
    assert cost.needs(8, 64) == []
    for _ in range(6000):
        cost.note(8, 0, 10.0, 0.3)
    assert cost.needs(8, 64), "and again after a long time"


@dataclass(frozen=True)
class _Timed:
    """A step in flight on that machine."""

    handle: StepHandle
    num_rows: int

    def result(self) -> StepResult:
        return replace(self.handle.result(), forward_ms=_step_ms(self.num_rows), sample_ms=0.0)


@pytest.mark.parametrize(("alphabet", "least"), [(16, 0.98), (1, 2.0)])
def test_drafts_are_off_where_they_do_not_pay_and_save_time_where_they_do(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, alphabet: int, least: float
) -> None:
    spent_ms = {}
    for name in ("off", "ngram"):
        engine = make_engine(runner="native", dtype="bfloat16", speculative=name)
        steps: list[_Timed] = []

        def submit(plan: StepPlan, submit: Submit = engine._runner.submit, steps: list[_Timed] = steps) -> StepHandle:
            steps.append(_Timed(submit(plan), len(plan.token_ids)))
            return steps[-1]

        monkeypatch.setattr(engine._runner, "submit", submit)
        likely = dict.fromkeys(range(3, 3 + alphabet), 60.0)
        params = SamplingParams(temperature=2.0, ignore_eos=True, logit_bias=likely, max_tokens=100)
        for _ in range(3):
            for i in range(8):
                engine.add(EngineRequest(str(i), [3 + i], params, seed=i))
            _run(engine)
        spent_ms[name] = sum(_step_ms(step.num_rows) for step in steps)
    assert spent_ms["off"] / spent_ms["ngram"] > least


class _WithStates:
    """What `speculation_of` asks of a runner."""

    verifies_drafts = True
    state_sizes = StateSizes(4, 1 << 20)


def test_a_model_with_states_drafts_nothing_and_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    budget = speculation_of(EngineConfig(model="m", speculative="ngram"), cast("ModelRunner", _WithStates()))
    assert budget.max_draft_tokens == 0
    (record,) = caplog.records
    assert record.message.endswith("is off: states of recurrent layers cannot forget a rejected draft")
