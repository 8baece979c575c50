"""Log-probabilities of outputs and prompts equal transformers' log-softmax, in any batch."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from fakes.engine_runs import TORCH
from fakes.runners.ahead_runner import AheadRunner
from fakes.runners.faulty_runner import FaultyRunner
from numpy.typing import NDArray

from penstock.contract.errors import RequestError
from penstock.contract.job import SamplingParams
from penstock.contract.output import MAX_LOGPROBS_OF_JOB, TokenLogprobs
from penstock.gpu_node.engine import Engine, Generation, ResumedChoice, StepOutput
from penstock.gpu_node.engine.records import EngineRequest


def _prompts(count: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [rng.choices(range(300), k=rng.randrange(20, 60)) for _ in range(count)]


RUNNERS = {
    "torch": ({"runner": "torch", "dtype": "float32"}, 1e-4),
    # Its weights and activations are rounded to eight bits; these logits reach from -15 to 10.
    "native": ({"runner": "native", "dtype": "bfloat16"}, 0.3),
}
PROMPTS = _prompts(6, seed=4)
PARAMS = [
    SamplingParams(max_tokens=6, temperature=0.0, logprobs=0, prompt_logprobs=20),
    SamplingParams(max_tokens=12, temperature=0.7, seed=1, logprobs=5, top_k=9, logit_bias={7: 3.0}),
    SamplingParams(max_tokens=9, n=3, seed=2, logprobs=2, prompt_logprobs=0, ignore_eos=True),
    SamplingParams(max_tokens=9, seed=3),
    SamplingParams(max_tokens=9, temperature=0.0, logprobs=20, repetition_penalty=1.5, presence_penalty=1.0),
    SamplingParams(max_tokens=1, prompt_logprobs=3),
]


def _log_softmax(model: Any, token_ids: Sequence[int]) -> NDArray[np.float32]:
    """Return the log-probabilities of the token after each position, [tokens, vocab]."""
    with torch.inference_mode():
        values: NDArray[np.float32] = model(torch.tensor([list(token_ids)])).logits[0].log_softmax(-1).numpy()
    return values


def _check(entries: Sequence[TokenLogprobs], ids: Sequence[int], wanted: NDArray[np.float32], num: int, most: float):
    assert [entry.token_ids[0] for entry in entries] == list(ids)
    for entry, row in zip(entries, wanted, strict=True):
        assert len(entry.top) == num
        np.testing.assert_allclose(entry.values, row[list(entry.token_ids)], rtol=0, atol=most)
        values = [top.logprob for top in entry.top]
        assert values == sorted(values, reverse=True)
        np.testing.assert_allclose(values, np.sort(row)[::-1][:num], rtol=0, atol=most)


def _check_all(model: Any, said: Sequence[Generation], params: Sequence[SamplingParams], most: float) -> None:
    for generation, wanted in zip(said, params, strict=True):
        prompt = generation.prompt_token_ids
        if wanted.prompt_logprobs is None:
            assert generation.prompt_logprobs == ()
        else:
            first, *rest = generation.prompt_logprobs
            assert (first.token_ids, first.logprob, first.top) == (prompt[:1], None, [])
            _check(rest, prompt[1:], _log_softmax(model, prompt)[:-1], wanted.prompt_logprobs, most)
        for choice in generation.choices:
            if wanted.logprobs is None:
                assert choice.logprobs == ()
                continue
            rows = _log_softmax(model, prompt + choice.token_ids)[len(prompt) - 1 : -1]
            _check(choice.logprobs, choice.token_ids, rows, wanted.logprobs, most)


@pytest.mark.parametrize("runner", RUNNERS)
def test_logprobs_of_every_row_of_a_mixed_batch(model: Any, make_engine: Callable[..., Engine], runner: str) -> None:
    settings, most = RUNNERS[runner]
    engine = make_engine(max_num_batched_tokens=24, max_num_seqs=16, **settings)
    for _ in range(2):  # the second time all prompts are cached
        _check_all(model, engine.generate(PROMPTS, PARAMS), PARAMS, most)
    assert engine.stats().prefix_hit_tokens > 0


@pytest.mark.parametrize("runner", RUNNERS)
def test_logprobs_are_the_same_through_preemption(make_engine: Callable[..., Engine], runner: str) -> None:
    """A pool that holds two of these at a time: what was scored or said before is not said otherwise later."""
    settings, _ = RUNNERS[runner]
    roomy, tight = (
        make_engine(**settings, max_num_batched_tokens=24, max_num_seqs=16, num_kv_blocks=num) for num in (256, 9)
    )
    prompts = _prompts(8, seed=5)
    params = [SamplingParams(max_tokens=20, seed=i, logprobs=2, prompt_logprobs=1, ignore_eos=True) for i in range(8)]
    want, got = (engine.generate(prompts, params) for engine in (roomy, tight))
    assert tight.stats().num_preemptions > 0
    for one, other in zip(want, got, strict=True):
        assert [choice.token_ids for choice in one.choices] == [choice.token_ids for choice in other.choices]
        pairs = [(one.prompt_logprobs, other.prompt_logprobs)]
        pairs += [(a.logprobs, b.logprobs) for a, b in zip(one.choices, other.choices, strict=True)]
        for mine, theirs in pairs:
            assert len(mine) == len(theirs) > 0
            for a, b in zip(mine, theirs, strict=True):
                np.testing.assert_allclose(a.values, b.values, rtol=0, atol=0 if runner == "native" else 1e-4)


@pytest.mark.parametrize("is_ahead", [False, True])
def test_logprobs_are_the_same_through_failed_steps(make_engine: Callable[..., Engine], is_ahead: bool) -> None:
    """Also with steps that are planned before the tokens ahead of them are known."""
    settings, rng = RUNNERS["native"][0], random.Random(1)
    sizes = {"max_num_batched_tokens": 24, "max_num_seqs": 12, "num_kv_blocks": 24, "num_swap_blocks": 20}
    params = [SamplingParams(max_tokens=15, n=2, seed=i, logprobs=1, prompt_logprobs=1) for i in range(6)]
    want = make_engine(**settings).generate(PROMPTS, params)
    engine = make_engine(**settings, **sizes, preemption="swap")
    errors = [RuntimeError(), MemoryError(), *[None] * 18]
    faulty = FaultyRunner(engine._runner, lambda at, _: rng.choice(errors) if at == "forward" else None)
    engine._runner = AheadRunner(faulty) if is_ahead else faulty
    for i, (prompt, wanted) in enumerate(zip(PROMPTS, params, strict=True)):
        engine.add(EngineRequest(str(i), prompt, wanted, seed=i))
    outputs: list[StepOutput] = []
    while engine.has_work():
        with suppress(RuntimeError, MemoryError):
            outputs += engine.step()
    assert engine.stats().num_failed_steps > 2
    for i, generation in enumerate(want):
        own = [output for output in outputs if output.request_id == str(i)]
        assert [entry for output in own for entry in output.prompt_logprobs] == list(generation.prompt_logprobs)
        for choice in generation.choices:
            said = [entry for output in own if output.choice == choice.index for entry in output.logprobs]
            assert said == list(choice.logprobs)


def _outputs(engine: Engine) -> list[StepOutput]:
    outputs: list[StepOutput] = []
    while engine.has_work():
        outputs += engine.step()
    return outputs


@pytest.mark.parametrize("num_logged", [0, 1, 5])
def test_another_engine_continues_with_the_same_logprobs(make_engine: Callable[..., Engine], num_logged: int) -> None:
    params = SamplingParams(max_tokens=12, seed=3, logprobs=3, prompt_logprobs=2)
    first, second = make_engine(**TORCH), make_engine(**TORCH)
    first.add(EngineRequest("whole", PROMPTS[0], params, seed=3))
    whole = _outputs(first)
    said = [token for output in whole for token in output.token_ids][:num_logged]
    second.add(EngineRequest("rest", PROMPTS[0], params, seed=3, resume=[ResumedChoice(tuple(said), "", None)]))
    rest = _outputs(second)
    values = [[entry.values for output in outputs for entry in output.logprobs] for outputs in (whole, rest)]
    np.testing.assert_allclose(values[1], values[0][num_logged:], rtol=0, atol=1e-4)
    # A log has them before all tokens: a reader that finds tokens there finds those too.
    assert bool(rest[0].prompt_logprobs) == (num_logged == 0)


def test_tokens_are_named_by_what_they_add_to_the_text(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(**TORCH)
    params = SamplingParams(max_tokens=20, seed=5, logprobs=1, prompt_logprobs=0, ignore_eos=True)
    (said,) = engine.generate(["a wide gate"], params)
    assert b"".join(entry.shown for entry in said.prompt_logprobs).decode() == "a wide gate"
    shown = b"".join(entry.shown for entry in said.choices[0].logprobs)
    assert shown.decode(errors="replace") == said.choices[0].text
    (eos,) = engine.tokenizer.eos_token_ids
    assert isinstance(engine.tokenizer.name_of(eos), str)


def test_more_than_a_result_can_hold_is_refused(make_engine: Callable[..., Engine]) -> None:
    engine, prompt = make_engine(**TORCH, max_model_len=900, num_kv_blocks=64), [1] * 10
    fits = {"max_tokens": MAX_LOGPROBS_OF_JOB // (16 * 21), "n": 16, "logprobs": 20}
    engine.add(EngineRequest("0", prompt, SamplingParams(**fits), seed=0))
    for more in ({"prompt_logprobs": 20}, {"max_tokens": fits["max_tokens"] + 1}):
        with pytest.raises(RequestError, match=f"at most {MAX_LOGPROBS_OF_JOB} values") as refused:
            engine.add(EngineRequest("1", prompt, SamplingParams(**fits | more), seed=0))
        assert refused.value.param == "logprobs"
