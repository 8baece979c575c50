"""Drafts change how many steps an answer takes, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fakes.engine_runs import check_idle, drain
from fakes.oracle import Oracle
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.contract.job import SamplingParams
from penstock.contract.logprobs import TokenLogprobs
from penstock.contract.structured import StructuredOutputs
from penstock.gpu_node.engine import Engine, ResumedChoice, StepOutput
from penstock.gpu_node.engine.lookup import MATCHES, PromptLookup
from penstock.gpu_node.engine.speculation import Drafter, Speculation
from penstock.gpu_node.engine.step_cost import StepCost

MakeEngine = Callable[..., Engine]
Likely = list[TokenLogprobs]
Said = dict[tuple[str, int], tuple[list[int], str, str | None, Likely, Likely]]
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
    """One that drafts nothing and has room for all."""
    return make_engine(runner="native", dtype="bfloat16")


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    """Says what the engine drafts."""
    return Oracle()


@pytest.fixture(scope="module")
def drafting(make_engine: MakeEngine, oracle: Oracle) -> Engine:
    """One that drafts as much as it can, in a KV cache far too small."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.gpu_node.engine.engine.speculation_of", lambda config, runner: oracle)
        return make_engine(runner="native", dtype="bfloat16", **TIGHT)


def _add(engine: Engine, wanted: list[tuple[list[int], int, dict[str, Any]]]) -> None:
    for i, (prompt, max_tokens, given_options) in enumerate(wanted):
        engine.add(str(i), prompt, SamplingParams(max_tokens=max_tokens, **given_options), seed=i)


def _said(outputs: list[StepOutput]) -> Said:
    said: Said = {}
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


def _by_request(said: Said) -> Said:
    """The prompt's come with whichever choice is first."""
    for request_id in {request_id for request_id, _ in said}:
        own = sorted(key for key in said if key[0] == request_id)
        of_prompt = [entry for key in own for entry in said[key][4]]
        for key in own:
            said[key] = (*said[key][:4], of_prompt)
    return said


def _run(engine: Engine) -> Said:
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


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(wanted=requests, luck=st.integers(0, 1000))
def test_every_answer_is_what_it_is_without_drafts(
    plain: Engine, drafting: Engine, oracle: Oracle, wanted: list[tuple[list[int], int, dict[str, Any]]], luck: int
) -> None:
    _add(plain, wanted)
    want = _run(plain)
    oracle.rng = random.Random(luck)
    oracle.texts = [[*wanted[int(name)][0], *tokens] for (name, _), (tokens, *_) in want.items()]
    _add(drafting, wanted)
    assert _run(drafting) == want


def test_drafts_stand_and_save_steps(plain: Engine, drafting: Engine, oracle: Oracle) -> None:
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
def test_an_answer_that_another_node_began_goes_on_as_it_would_have(
    plain: Engine, drafting: Engine, oracle: Oracle, num_logged: int
) -> None:
    prompt, params = [5, 6, 7, 5, 6], SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True, min_tokens=40)
    plain.add("x", prompt, params, seed=3)
    want, *_ = _run(plain)["x", 0]
    oracle.texts = [[*prompt, *want]]
    drafting.add("x", prompt, params, seed=3, resume=[ResumedChoice(tuple(want[:num_logged]), "", None)])
    outputs = drain(drafting)
    assert [token for output in outputs for token in output.token_ids] == want[num_logged:]
    check_idle(drafting)


def test_the_engines_own_drafts_change_nothing(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Speculation, "begin", lambda self, num_decoding: 0.0)
    for runner, dtype in (("native", "bfloat16"), ("torch", "float32")):
        engines = [make_engine(runner=runner, dtype=dtype, speculative=name) for name in ("off", "ngram")]
        prompts = [[*range(3, 20), *range(3, 8)], [9, 8, 9, 8, 9], [40]]
        params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, logit_bias={7: 20.0, 8: 19.5, 9: 19.0})
        want, got = ([one.choices for one in engine.generate(prompts, params)] for engine in engines)
        assert got == want
        assert engines[0].stats().drafted_tokens == 0
        assert engines[1].stats().accepted_tokens > 20
        assert engines[1].stats().steps < engines[0].stats().steps


def test_what_followed_the_longest_run_is_found() -> None:
    rng = np.random.default_rng(0)
    for alphabet in (2, 5, 300):
        tokens = rng.integers(0, alphabet, 400).astype(np.int32)
        lookup = PromptLookup(400)
        at = num_asked = num_found = 0
        while at < len(tokens):
            step = int(rng.choice([1, 2, 5, 60]))
            lookup.extend(tokens[at : at + step])
            at = min(at + step, len(tokens))
            found, match = lookup.find()
            so_far = tokens[:at].tolist()
            wanted = [place for size in (4, 3, 2) if (place := _last_place(so_far, size))]
            num_asked, num_found = num_asked + 1, num_found + (found == (wanted[0] if wanted else 0))
            if found:
                size = MATCHES[match]
                assert so_far[found - size : found] == so_far[-size:]
        assert num_found >= 0.9 * num_asked  # the others share a place with one that was seen later


def _last_place(tokens: list[int], size: int) -> int:
    tail = tokens[-size:]
    return next((at for at in range(len(tokens) - 1, size - 1, -1) if tokens[at - size : at] == tail), 0)


def test_a_loop_goes_on_behind_the_last_token() -> None:
    lookup = PromptLookup(50)
    lookup.extend(np.array([1, 2, 3] * 4, np.int32))
    at, _ = lookup.find()
    assert lookup.following(at, 7) == [1, 2, 3, 1, 2, 3, 1]


def _drafted(speculation: Speculation, drafter: Drafter, num_decoding: int) -> int:
    least_odds = speculation.begin(num_decoding)
    if not speculation.pays(drafter, least_odds):
        return 0
    return len(speculation.draft(drafter, np.array([1, 2, 3, 4], np.int32), 8, least_odds))


def _after(num_tries: int, num_stood: int) -> tuple[Speculation, Drafter]:
    """One whose step costs 10 and 1 for each token, after drafts of eight tokens of which so many stood."""
    speculation, drafter = Speculation(8), Drafter(PromptLookup(1000))
    for num_tokens in (1, 200, 1, 9, 1):
        speculation.cost.note(num_tokens, 10.0 + num_tokens)
    drafter.match = len(MATCHES) - 1
    for _ in range(num_tries):
        speculation.verified(drafter, 8, num_stood)
    drafter.lookup.extend(np.array([1, 2, 3, 4] * 5, np.int32))
    return speculation, drafter


def test_drafts_stop_where_they_do_not_pay() -> None:
    good, bad = _after(30, 6), _after(30, 0)
    assert _drafted(*good, num_decoding=1) == 8
    assert 0 < _drafted(*good, num_decoding=16) < 8  # 16 of 26 for tokens
    assert _drafted(*good, num_decoding=200) == 0
    assert _drafted(*bad, num_decoding=1) == 0


def test_where_drafts_do_not_pay_a_few_are_tried() -> None:
    speculation, _ = _after(0, 0)
    num_tried = 0
    for _ in range(1000):
        speculation.begin(64)
        if speculation.on_trial(64):
            speculation._trials -= 1
            num_tried += 1
    assert 0 < num_tried * speculation.cost.token_ms < 0.01 * 1000 * speculation.cost.step_ms(64)


def test_what_a_token_costs_is_learnt_through_noise() -> None:
    rng = random.Random(0)
    for step_ms, token_ms in ((1.5, 0.17), (4.0, 0.3), (30.0, 0.02)):
        cost = StepCost()
        for i in range(600):
            num_tokens = 150 if i % 60 == 0 else rng.choice([8, 8, 9, 12, 24])
            slowed = rng.choice([1.0] * 9 + [5.0])
            cost.note(num_tokens, (step_ms + token_ms * num_tokens) * rng.uniform(0.97, 1.06) * slowed)
        assert cost.token_ms == pytest.approx(token_ms, rel=0.5)
        assert cost.step_ms(8) == pytest.approx(step_ms + 8 * token_ms, rel=0.25)
