"""Beam search and `best_of` in the engine: repeatable results, shared blocks, preemption, failures, and refusals."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from fakes.engine_runs import check_idle, drain, tokens_of
from pydantic import ValidationError

from penstock.contract.errors import PromptTooLongError, RequestError
from penstock.contract.problems import problem_of
from penstock.contract.sampling import NOT_WITH_BEAM_SEARCH, SamplingParams
from penstock.gpu_node.engine import Engine, Generation, ResumedChoice, StepOutput
from penstock.gpu_node.engine.records import EngineRequest
from penstock.gpu_node.model.protocol import FAILED_TOKEN

MakeEngine = Callable[..., Engine]
BEAMS = SamplingParams(n=4, use_beam_search=True, max_tokens=24, ignore_eos=True)
BEST_OF = SamplingParams(n=2, best_of=5, max_tokens=24, ignore_eos=True, seed=3)


@cache
def prompts() -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(3, 250) for _ in range(rng.randrange(5, 60))] for _ in range(8)]


def tokens(generations: list[Generation]) -> list[list[tuple[int, ...]]]:
    return [[choice.token_ids for choice in one.choices] for one in generations]


@pytest.fixture(scope="module")
def alone(make_engine: MakeEngine) -> dict[str, list[list[tuple[int, ...]]]]:
    """The choices of each prompt, computed with nothing beside it."""
    found = {}
    for name, params in (("beams", BEAMS), ("best_of", BEST_OF)):
        engine = make_engine(enable_prefix_caching=False)
        whole = []
        for prompt in prompts():
            engine.add_request(prompt, params, request_id="0")
            whole.append(drain(engine))
        found[name] = [[tuple(tokens_of(outputs, "0", i)) for i in range(params.n)] for outputs in whole]
        check_idle(engine)
    return found


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_kv_blocks": 24, "max_num_seqs": 8},
        {"num_kv_blocks": 24, "max_num_seqs": 16, "max_num_batched_tokens": 16, "enable_prefix_caching": False},
        {"num_kv_blocks": 24, "num_swap_blocks": 60, "preemption": "swap", "max_num_seqs": 12},
        {"num_kv_blocks": 40, "speculative": "ngram", "max_num_seqs": 16},
        {"num_kv_blocks": 24, "max_num_seqs": 8, "scheduling_policy": "fair"},
    ],
)
def test_beams_are_bitwise_the_same_in_any_batch_and_after_preemptions(
    make_engine: MakeEngine, alone: dict[str, list[list[tuple[int, ...]]]], settings: dict[str, Any]
) -> None:
    engine = make_engine(**settings)
    for i, prompt in enumerate(prompts()):
        engine.add(EngineRequest(f"beams-{i}", prompt, BEAMS, seed=i, tenant=f"t{i % 3}"))
        engine.add(EngineRequest(f"plain-{i}", prompt, BEST_OF, seed=3, background=i % 2 == 1))
    outputs: list[StepOutput] = []
    while engine.has_work():
        outputs += engine.step()
        engine.check_integrity()
    stats = engine.stats()
    if settings:
        assert stats.num_preemptions > 0
    for i in range(len(prompts())):
        assert [tuple(tokens_of(outputs, f"beams-{i}", choice)) for choice in range(4)] == alone["beams"][i]
        assert [tuple(tokens_of(outputs, f"plain-{i}", choice)) for choice in range(2)] == alone["best_of"][i]
    ends = [output for output in outputs if output.usage is not None]
    assert len(ends) == 2 * len(prompts())
    check_idle(engine)


def test_nothing_is_output_before_all_choices_are_complete(make_engine: MakeEngine) -> None:
    for params in (BEAMS, BEST_OF):
        engine = make_engine()
        engine.add_request(prompts()[0], params)
        steps = []
        while engine.has_work():
            steps.append(engine.step())
        assert not any(steps[:-2])
        outputs = [output for step in steps for output in step]
        assert [output.usage is not None for output in outputs] == [False] * (len(outputs) - 1) + [True]
        usage = outputs[-1].usage
        assert usage is not None and usage.prompt_tokens == len(prompts()[0])
        # A beam search follows one beam in its first step.
        assert usage.completion_tokens == {4: 1 + 23 * 4, 2: 5 * 24}[params.n]


def test_best_of_returns_the_choices_with_the_highest_mean_logprob(make_engine: MakeEngine) -> None:
    engine = make_engine()
    all_of_them = BEST_OF.model_copy(update={"n": 5, "best_of": None, "logprobs": 0})
    ended_early = {"ignore_eos": False, "stop_token_ids": (*range(40, 60),)}
    for more in ({}, ended_early):
        (whole,) = engine.generate([prompts()[1]], all_of_them.model_copy(update=more))
        means = [float(np.mean([entry.values[0] for entry in choice.logprobs])) for choice in whole.choices]
        ranked = sorted(range(5), key=lambda i: -means[i])
        (best,) = engine.generate([prompts()[1]], BEST_OF.model_copy(update=more))
        assert [choice.token_ids for choice in best.choices] == [whole.choices[i].token_ids for i in ranked[:2]]
        assert [choice.text for choice in best.choices] == [whole.choices[i].text for i in ranked[:2]]
        assert not best.choices[0].logprobs
        (told,) = engine.generate([prompts()[1]], BEST_OF.model_copy(update={"logprobs": 2} | more))
        assert [len(choice.logprobs) for choice in told.choices] == [len(one.token_ids) for one in best.choices]
        assert len(told.choices[0].logprobs[0].values) == 3


def test_beams_share_blocks_and_the_share_that_this_saves_is_known(make_engine: MakeEngine) -> None:
    engine = make_engine()
    params = BEAMS.model_copy(update={"max_tokens": 64})
    engine.generate(prompts()[:2], params)
    stats = engine.stats()
    assert 0.3 < 1 - stats.search_blocks_held / stats.search_blocks_needed < 0.75
    engine = make_engine()
    engine.generate([[7] * 64], BEST_OF)
    stats = engine.stats()
    # Five choices share four blocks of the prompt, and each fills two of its own.
    assert 0.4 < 1 - stats.search_blocks_held / stats.search_blocks_needed < 0.6


def test_a_node_that_takes_over_skips_what_is_logged(make_engine: MakeEngine) -> None:
    for params in (BEAMS, BEST_OF):
        (whole,) = make_engine().generate([prompts()[2]], params)
        first = whole.choices[0]
        engine = make_engine()
        resume = [ResumedChoice(first.token_ids, first.text, first.finish_reason)]
        seed = 3 if params is BEST_OF else 0
        engine.add(EngineRequest("x", prompts()[2], params, seed=seed, resume=resume))
        outputs = drain(engine)
        assert {output.choice for output in outputs} == set(range(1, params.n))
        assert [tuple(tokens_of(outputs, "x", i)) for i in range(1, params.n)] == [
            choice.token_ids for choice in whole.choices[1:]
        ]
        assert outputs[-1].usage is not None
        resume = [ResumedChoice(one.token_ids, one.text, one.finish_reason) for one in whole.choices]
        engine.add(EngineRequest("y", prompts()[2], params, seed=seed, resume=resume))
        assert drain(engine) == []
        check_idle(engine)


def test_a_search_can_be_aborted_at_any_step(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_batched_tokens=16, max_num_seqs=8)
    for params in (BEAMS, BEST_OF):
        for num_steps in (0, 1, 3, 4, 5, 6, 9):
            engine.add_request(prompts()[3], params, request_id="x")
            outputs = [output for _ in range(num_steps) for output in engine.step()]
            engine.abort("x")
            assert outputs + drain(engine) == []
            check_idle(engine)


@pytest.mark.parametrize("at", [1, 2, 9])
def test_a_beam_that_cannot_be_computed_fails_its_search_alone(
    make_engine: MakeEngine, alone: dict[str, Any], monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    engine = make_engine()
    submit, num_steps = engine._runner.submit, 0

    class Failing:
        def __init__(self, handle: Any, plan: Any) -> None:
            self.handle, self.plan = handle, plan

        def result(self) -> Any:
            found = self.handle.result()
            (rows,) = np.nonzero(self.plan.sampling.seed == 13)
            if len(rows) and num_steps >= at:
                found.tokens[rows[-1]] = FAILED_TOKEN
            return found

    def failing(plan: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        return Failing(submit(plan), plan)

    monkeypatch.setattr(engine._runner, "submit", failing)
    engine.add(EngineRequest("bad", prompts()[4], BEAMS, seed=13))
    engine.add(EngineRequest("good", prompts()[5], BEAMS, seed=0))
    outputs = drain(engine)
    bad = [output for output in outputs if output.request_id == "bad"]
    assert [(output.choice, output.finish_reason) for output in bad] == [(i, "error") for i in range(4)]
    assert [tuple(tokens_of(outputs, "good", i)) for i in range(4)] == alone["beams"][5]
    check_idle(engine)


def test_steps_that_fail_change_no_beams(
    make_engine: MakeEngine, alone: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(num_kv_blocks=64)
    submit, count = engine._runner.submit, 0

    def failing(plan: Any) -> Any:
        nonlocal count
        count += 1
        if count in (5, 11, 25):
            raise MemoryError if count == 11 else OSError("a step fails")
        return submit(plan)

    monkeypatch.setattr(engine._runner, "submit", failing)
    for i in range(3):
        engine.add(EngineRequest(str(i), prompts()[i], BEAMS, seed=0))
    outputs = []
    while engine.has_work():
        try:
            outputs += engine.step()
        except (MemoryError, OSError):
            engine.check_integrity()
    assert [[tuple(tokens_of(outputs, str(i), j)) for j in range(4)] for i in range(3)] == alone["beams"][:3]
    check_idle(engine)


def test_a_search_that_makes_every_step_fail_ends_with_an_error(
    make_engine: MakeEngine, alone: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(num_kv_blocks=64)
    submit = engine._runner.submit

    def failing(plan: Any) -> Any:
        if ((plan.sampling.seed == 13) & (plan.sampling.position >= 2)).any():
            raise OSError("a step fails")
        return submit(plan)

    monkeypatch.setattr(engine._runner, "submit", failing)
    engine.add(EngineRequest("bad", prompts()[0], BEAMS, seed=13))
    engine.add(EngineRequest("good", prompts()[1], BEAMS, seed=0))
    outputs: list[StepOutput] = []
    for _ in range(200):
        try:
            outputs += engine.step()
        except OSError:
            engine.check_integrity()
    assert [output.finish_reason for output in outputs if output.request_id == "bad"] == ["error"] * 4
    assert [tuple(tokens_of(outputs, "good", i)) for i in range(4)] == alone["beams"][1]
    check_idle(engine)


def test_stop_tokens_text_and_prompt_logprobs_of_beams(make_engine: MakeEngine) -> None:
    engine = make_engine()
    ends = {"stop_token_ids": (*range(40, 72),), "prompt_logprobs": 1}
    for keeps in (False, True):
        params = BEAMS.model_copy(update=ends | {"include_stop_str_in_output": keeps})
        (found,) = engine.generate([prompts()[6]], params)
        assert len(found.prompt_logprobs) == len(prompts()[6])
        assert "stop" in [choice.finish_reason for choice in found.choices]
        for choice in found.choices:
            is_whole = keeps or choice.finish_reason == "length"
            detokenizer = engine.tokenizer.new_detokenizer()
            shown = detokenizer.push(choice.token_ids if is_whole else choice.token_ids[:-1])
            assert choice.text == shown + detokenizer.flush()


def test_beams_that_no_node_could_compute_together_are_refused(make_engine: MakeEngine) -> None:
    engine = make_engine(num_kv_blocks=8, max_num_seqs=4)
    with pytest.raises(RequestError, match="use_beam_search: 5 beams, but a step of this node has at most 4"):
        engine.add_request([5], BEAMS.model_copy(update={"n": 5}))
    with pytest.raises(PromptTooLongError, match="4 beams after 20 prompt tokens may have 12 tokens each") as refused:
        engine.add_request([5] * 20, BEAMS)
    assert refused.value.param == "max_tokens"
    (found,) = engine.generate([[5] * 20], BEAMS.model_copy(update={"max_tokens": None}))
    assert [len(choice.token_ids) for choice in found.choices] == [12] * 4


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"best_of": 1, "n": 2}, "best_of"),
    ({"best_of": 17}, "best_of"),
    ({"beam_width": 4}, "beam_width"),
    ({"length_penalty": 2.0}, "length_penalty"),
    ({"early_stopping": True}, "early_stopping"),
    ({"use_beam_search": True, "early_stopping": "x"}, "early_stopping"),
    ({"use_beam_search": True, "beam_width": 17}, "beam_width"),
    ({"use_beam_search": True, "beam_width": 2, "n": 4}, "beam_width"),
    ({"use_beam_search": True, "beam_width": 4, "best_of": 5}, "beam_width"),
    ({"use_beam_search": True, "length_penalty": 11}, "length_penalty"),
    ({"use_beam_search": True, "temperature": 0.7}, "temperature"),
]
OTHERS: dict[str, Any] = {
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "presence_penalty": 1,
    "min_tokens": 2,
    "frequency_penalty": 1,
    "stop": ["x"],
    "logit_bias": {5: 1},
    "bad_words": ["x"],
    "logprobs": 1,
    "structured_outputs": {"regex": "a"},
    "reasoning_budget": 5,
}


@pytest.mark.parametrize(
    ("options", "name"), [*REFUSED, *(({"use_beam_search": True, name: OTHERS[name]}, name) for name in OTHERS)]
)
def test_options_that_do_not_fit_together_are_refused_by_name(options: dict[str, Any], name: str) -> None:
    assert set(OTHERS) == set(NOT_WITH_BEAM_SEARCH)
    with pytest.raises(ValidationError) as refused:
        SamplingParams(**options)
    assert problem_of(refused.value).param == name
