"""The engine through its public interface, on the tiny model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes.engine_runs import TORCH, check_idle, drain, tokens_of
from fakes.poison import poisoned

from penstock.contract.errors import ConfigError, ConflictError, NotFoundError, PromptTooLongError, RequestError
from penstock.contract.job import SamplingParams
from penstock.contract.output import Usage
from penstock.gpu_node.engine import Engine, EngineConfig, StepOutput
from penstock.gpu_node.engine.records import EngineRequest

PROMPTS = ["the gate opens by pressure", "水門 🌊", "a", "the gate opens and the turbine " * 6, "Größe " * 20]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True, seed=5)

MakeEngine = Callable[..., Engine]


@pytest.fixture(scope="module")
def greedy_alone(plain: Engine) -> list[tuple[int, ...]]:
    """Each prompt's greedy tokens, run alone."""
    return [plain.generate([prompt], GREEDY)[0].choices[0].token_ids for prompt in PROMPTS]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 7, "max_num_seqs": 5},
        {"max_num_batched_tokens": 7, "max_num_seqs": 5, "scheduling_policy": "round_robin"},
        {"max_num_batched_tokens": 3, "max_num_seqs": 3, "num_kv_blocks": 14, "scheduling_policy": "round_robin"},
        {"num_kv_blocks": 12},
        {"enable_prefix_caching": False, "num_kv_blocks": 14},
        {"block_size": 32, "num_kv_blocks": 14, "max_num_batched_tokens": 16, "max_num_seqs": 3},
        {"block_size": 32},
    ],
)
def test_batching_changes_no_tokens(
    make_engine: MakeEngine, greedy_alone: list[tuple[int, ...]], settings: dict[str, Any]
) -> None:
    engine = make_engine(**settings)
    for _ in range(2):
        got = engine.generate(PROMPTS, GREEDY)
        assert [generation.choices[0].token_ids for generation in got] == greedy_alone
    check_idle(engine)


def test_block_size_8_changes_no_tokens_on_torch(make_engine: MakeEngine) -> None:
    """The native runner has none."""
    alone = make_engine(**TORCH)
    want = [alone.generate([prompt], GREEDY)[0].choices for prompt in PROMPTS]
    engine = make_engine(**TORCH, block_size=8, num_kv_blocks=24, max_num_batched_tokens=16, max_num_seqs=3)
    assert [generation.choices for generation in engine.generate(PROMPTS, GREEDY)] == want
    check_idle(engine)


def test_last_outputs_count_the_preemptions_of_their_choices(make_engine: MakeEngine) -> None:
    small = make_engine(num_kv_blocks=12)
    for i, prompt in enumerate(PROMPTS):
        small.add(EngineRequest(str(i), small.tokenizer.encode(prompt), GREEDY, seed=0))
    ends = [output for output in drain(small) if output.finish_reason is not None]
    assert sum(output.num_preemptions for output in ends) == small.stats().num_preemptions > 0


def test_small_pools_preempt_and_cached_prompts_are_not_computed_again(make_engine: MakeEngine) -> None:
    small, large = make_engine(num_kv_blocks=12), make_engine()
    small.generate(PROMPTS, GREEDY)
    assert small.stats().num_preemptions > 0
    first = large.generate(PROMPTS, GREEDY)
    computed = large.stats().prefill_tokens
    again = large.generate(PROMPTS, GREEDY)
    assert [g.usage.cached_tokens for g in first] == [0] * len(PROMPTS)
    assert [g.usage.cached_tokens for g in again] == [(len(g.prompt_token_ids) - 1) // 16 * 16 for g in again]
    assert large.stats().prefill_tokens - computed < computed
    assert again[3].usage == Usage(len(again[3].prompt_token_ids), 24, again[3].usage.cached_tokens)


def test_sampled_tokens_do_not_depend_on_batch_mates(make_engine: MakeEngine, plain: Engine) -> None:
    kinds = [{"top_k": 5}, {"top_p": 0.7}, {"repetition_penalty": 1.3}, {"temperature": 0.0}, {"temperature": 1.7}]
    params = [SAMPLED.model_copy(update=kind) for kind in kinds]
    alone = [plain.generate([p], q)[0].choices[0] for p, q in zip(PROMPTS, params, strict=True)]
    together = make_engine(max_num_batched_tokens=16, max_num_seqs=4).generate(PROMPTS, params)
    assert [generation.choices[0] for generation in together] == alone


def test_choices_differ_share_their_prompt_and_repeat_with_the_seed(make_engine: MakeEngine) -> None:
    engine = make_engine()
    params = SAMPLED.model_copy(update={"n": 3})
    once, again = (engine.generate([PROMPTS[3]], params)[0] for _ in range(2))
    other = engine.generate([PROMPTS[3]], params.model_copy(update={"seed": 6}))[0]
    assert once.choices == again.choices != other.choices
    assert len({choice.token_ids for choice in once.choices}) == 3
    assert once.usage.completion_tokens == 3 * 24 and once.usage.cached_tokens == 0
    assert engine.generate([PROMPTS[3]], SAMPLED)[0].choices[0] == once.choices[0]


def test_sequences_join_and_leave_between_steps(plain: Engine, greedy_alone: list[tuple[int, ...]]) -> None:
    outputs = []
    for i, prompt in enumerate(PROMPTS):
        plain.add(EngineRequest(str(i), plain.tokenizer.encode(prompt), GREEDY, seed=0))
        for _ in range(3):
            outputs += plain.step()
    outputs += drain(plain)
    assert [tuple(tokens_of(outputs, str(i))) for i in range(len(PROMPTS))] == greedy_alone
    positions = [output.position for output in outputs if output.request_id == "1"]
    assert positions == list(range(24))
    check_idle(plain)


def test_abort_gives_all_blocks_back_wherever_the_request_is(make_engine: MakeEngine) -> None:
    engine = make_engine(num_kv_blocks=16, max_num_seqs=2, max_num_batched_tokens=16)
    for i, prompt in enumerate(PROMPTS):
        engine.add(EngineRequest(str(i), engine.tokenizer.encode(prompt), GREEDY.model_copy(update={"n": 2}), seed=0))
    for i in range(len(PROMPTS)):
        engine.step()
        stats = engine.stats()
        assert stats.num_running + stats.num_waiting > 0
        engine.abort(str(i))
        engine.abort(str(i))
        engine.check_integrity()
    assert drain(engine) == [] and engine.step() == []
    check_idle(engine)


def test_step_runs_in_any_thread(plain: Engine, greedy_alone: list[tuple[int, ...]]) -> None:
    plain.add(EngineRequest("x", plain.tokenizer.encode(PROMPTS[0]), GREEDY, seed=0))
    outputs: list[StepOutput] = []
    thread = threading.Thread(target=lambda: outputs.extend(drain(plain)))
    thread.start()
    thread.join(30)
    assert tuple(tokens_of(outputs, "x")) == greedy_alone[0]


def test_min_tokens_bans_the_end_and_ignore_eos_runs_over_it(plain: Engine) -> None:
    end = plain.generate(["a"], GREEDY)[0].choices[0].token_ids[3]
    params = SamplingParams(temperature=0.0, max_tokens=24, stop_token_ids=(end,), ignore_eos=True)
    stopped = plain.generate(["a"], params)[0].choices[0]
    assert stopped.finish_reason == "stop" and len(stopped.token_ids) == 4 and stopped.token_ids[-1] == end
    longer = plain.generate(["a"], params.model_copy(update={"min_tokens": 10}))[0].choices[0]
    assert end not in longer.token_ids[:10] and len(longer.token_ids) > 10
    full = plain.generate(["a"], GREEDY)[0].choices[0]
    assert (full.finish_reason, len(full.token_ids)) == ("length", 24)


def test_eos_ends_a_choice_unless_it_is_ignored(make_engine: MakeEngine, plain: Engine) -> None:
    seeds = range(40)
    params = [SAMPLED.model_copy(update={"ignore_eos": False, "max_tokens": 100, "seed": seed}) for seed in seeds]
    choices = [generation.choices[0] for generation in plain.generate(["a"] * 40, params)]
    ended = [choice for choice in choices if choice.finish_reason == "stop"]
    assert ended and all(choice.token_ids[-1] == 2 and 2 not in choice.token_ids[:-1] for choice in ended)
    assert all(len(choice.token_ids) == 100 for choice in choices if choice.finish_reason == "length")


def test_a_stop_string_ends_the_text_before_it(plain: Engine) -> None:
    whole = plain.generate([PROMPTS[0]], GREEDY)[0].choices[0]
    stop = whole.text[6:9]
    choice = plain.generate([PROMPTS[0]], GREEDY.model_copy(update={"stop": (stop,)}))[0].choices[0]
    assert choice.finish_reason == "stop" and choice.text == whole.text[: whole.text.index(stop)]
    assert choice.token_ids == whole.token_ids[: len(choice.token_ids)]


def test_without_max_tokens_the_context_ends_it(make_engine: MakeEngine) -> None:
    engine = make_engine(max_model_len=40)
    generation = engine.generate(["the gate"], SamplingParams(temperature=0.0, ignore_eos=True))[0]
    assert generation.choices[0].finish_reason == "length"
    assert len(generation.prompt_token_ids) + len(generation.choices[0].token_ids) == 40


def test_a_pool_smaller_than_the_context_shortens_it(make_engine: MakeEngine) -> None:
    engine = make_engine(num_kv_blocks=3)
    assert engine.max_model_len == engine.num_kv_tokens == 48
    generation = engine.generate(["a"], SamplingParams(temperature=0.0, ignore_eos=True))[0]
    assert generation.usage.prompt_tokens + generation.usage.completion_tokens == 48


@pytest.mark.parametrize(
    ("prompt", "params", "error", "param"),
    [
        ([], {}, RequestError, "prompt"),
        ([1] * 64, {}, PromptTooLongError, "prompt"),
        ([1, 100_000], {}, RequestError, "prompt"),
        ([1, -1], {}, RequestError, "prompt"),
        ([1] * 10, {"max_tokens": 55}, PromptTooLongError, "max_tokens"),
        ([1] * 10, {"min_tokens": 55}, PromptTooLongError, "min_tokens"),
        ([1], {"stop_token_ids": (100_000,)}, RequestError, "stop_token_ids"),
    ],
)
def test_what_cannot_run_is_refused_by_name(
    make_engine: MakeEngine, prompt: list[int], params: dict[str, Any], error: type[RequestError], param: str
) -> None:
    engine = make_engine(max_model_len=64)
    with pytest.raises(error) as refusal:
        engine.add(EngineRequest("x", prompt, SamplingParams(**params), seed=0))
    assert refusal.value.param == param
    assert not engine.has_work()


def test_an_id_is_taken_once(plain: Engine) -> None:
    plain.add(EngineRequest("x", [1], GREEDY, seed=0))
    with pytest.raises(ConflictError):
        plain.add(EngineRequest("x", [1], GREEDY, seed=0))
    with pytest.raises(RequestError):
        plain.generate(["a"], GREEDY)
    plain.abort("x")


def test_usage_is_known_until_the_step_after_the_last(plain: Engine) -> None:
    plain.add(EngineRequest("x", [5, 6, 7], GREEDY.model_copy(update={"max_tokens": 1}), seed=0))
    assert plain.step() == []
    (last,) = plain.step()
    assert last.usage == plain.usage("x") == Usage(3, 1, 0)
    plain.step()
    with pytest.raises(NotFoundError):
        plain.usage("x")


def test_prompts_may_be_text_tokens_or_chats(plain: Engine) -> None:
    chat = [{"role": "user", "content": "hi"}]
    text, tokens, turns = plain.generate(["hi", plain.tokenizer.encode("hi"), chat], GREEDY)
    assert text.choices == tokens.choices
    assert list(turns.prompt_token_ids) == plain.tokenizer.encode_chat(chat)
    with pytest.raises(RequestError, match="must have a role"):
        plain.generate([[*chat, {"content": "hi"}]], GREEDY)


@pytest.mark.parametrize("prompts", ["hi", [1, 2], [{"role": "user", "content": "hi"}]])
def test_a_single_prompt_counts_as_a_list_of_one(plain: Engine, prompts: Any) -> None:
    plain.generate(prompts, GREEDY)  # From now on the prefix cache has as much of it each time.
    (generation,) = plain.generate(prompts, GREEDY)
    assert generation == plain.generate([prompts], GREEDY)[0]
    assert generation.text == generation.choices[0].text
    assert (generation.token_ids, generation.finish_reason) == (generation.choices[0].token_ids, "length")


@pytest.mark.parametrize("prompts", [5, {"role": "user"}, ["hi", 5], b"hi"])
def test_what_is_no_list_of_prompts_is_refused(plain: Engine, prompts: Any) -> None:
    with pytest.raises(RequestError) as caught:
        plain.generate(prompts, GREEDY)
    assert caught.value.param == "prompts"


def test_request_with_nonfinite_logits_fails_alone(make_engine: MakeEngine) -> None:
    engine = make_engine(**TORCH, enable_prefix_caching=True)
    want = engine.generate(["the gate"], GREEDY)[0].choices[0].token_ids
    with poisoned(engine._runner, 300):
        engine.add(EngineRequest("bad", [10] * 20 + [300], GREEDY, seed=0))
        engine.add(EngineRequest("good", engine.tokenizer.encode("the gate"), GREEDY, seed=0))
        outputs = drain(engine)
    bad = [output for output in outputs if output.request_id == "bad"]
    assert [(output.finish_reason, output.token_ids) for output in bad] == [("error", ())]
    assert bad[0].usage == Usage(21, 0, 0)
    assert tuple(tokens_of(outputs, "good")) == want
    again = engine.generate([[10] * 20 + [300]] * 20, GREEDY)
    assert {generation.choices[0].finish_reason for generation in again} == {"length"}
    check_idle(engine)


def test_blocks_of_an_aborted_nonfinite_prompt_can_be_used_again(make_engine: MakeEngine) -> None:
    engine = make_engine(**TORCH, enable_prefix_caching=False, num_kv_blocks=8, max_num_batched_tokens=64)
    want = engine.generate(["the gate"] * 2, GREEDY)
    with poisoned(engine._runner, 300):
        engine.add(EngineRequest("bad", [300] * 90, GREEDY, seed=0))
        engine.step()
        engine.abort("bad")
        while engine.has_work():
            engine.step()
    for _ in range(4):
        again = engine.generate(["the gate"] * 2, GREEDY)
        assert [one.choices[0].token_ids for one in again] == [one.choices[0].token_ids for one in want]
    check_idle(engine)


@pytest.mark.parametrize("fails_at_once", [False, True])
def test_a_runner_that_fails_once_loses_no_request(
    make_engine: MakeEngine, greedy_alone: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch, fails_at_once: bool
) -> None:
    engine = make_engine(max_num_batched_tokens=32, max_num_seqs=8)
    for i, prompt in enumerate(PROMPTS):
        engine.add(EngineRequest(str(i), engine.tokenizer.encode(prompt), GREEDY, seed=0))
    submit, outputs, calls = engine._runner.submit, [], iter(range(10_000))

    def flaky(plan: Any) -> Any:
        if next(calls) % 5 != 4:
            return submit(plan)
        if fails_at_once:
            raise RuntimeError("the GPU fell off the bus")
        failed: Future[Any] = Future()
        failed.set_exception(RuntimeError("the GPU fell off the bus"))
        return failed

    monkeypatch.setattr(engine._runner, "submit", flaky)
    while engine.has_work():
        try:
            outputs += engine.step()
        except RuntimeError:
            engine.check_integrity()
    assert [tuple(tokens_of(outputs, str(i))) for i in range(len(PROMPTS))] == greedy_alone
    check_idle(engine)


def test_revision_names_files_and_dtype_and_nothing_else(make_engine: MakeEngine, plain: Engine) -> None:
    assert plain.revision == make_engine(num_kv_blocks=10).revision
    assert plain.revision != make_engine(dtype="float32").revision
    assert len(plain.revision) == 32


@pytest.mark.parametrize("dtype", ["auto", "float32", "float16", "bfloat16"])
def test_every_dtype_runs(make_engine: MakeEngine, dtype: str) -> None:
    generations = make_engine(dtype=dtype).generate(PROMPTS, GREEDY)
    assert {len(generation.choices[0].token_ids) for generation in generations} == {24}


def test_stats_count_what_was_done(make_engine: MakeEngine) -> None:
    engine = make_engine()
    prompt = list(np.arange(40) + 10)
    engine.generate([prompt], GREEDY)
    stats = engine.stats()
    assert (stats.prefill_tokens, stats.decode_tokens, stats.steps) == (40, 24, 24)
    assert 0 < stats.step_ms_p50 <= stats.step_ms_p99
    parts = (stats.schedule_ms, stats.prepare_ms, stats.forward_ms, stats.sample_ms, stats.output_ms)
    assert min(parts) > 0 and stats.forward_ms + stats.sample_ms < stats.step_ms_p99
    assert (stats.kv_blocks_total, stats.block_size, stats.kv_blocks_cached) == (256, 16, 3)


@pytest.mark.parametrize(
    "settings",
    [{"num_kv_blocks": 4, "kv_cache_tokens": 64}, {"max_num_batched_tokens": 8}, {"block_size": 7}, {"colour": "red"}],
)
def test_invalid_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        EngineConfig(model="x", **settings)


def test_a_model_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    for model in (str(tmp_path / "missing"), str(tmp_path / "missing.gguf"), str(tmp_path)):
        with pytest.raises(ConfigError, match=str(tmp_path)):
            Engine(EngineConfig(model=model))


class CountedPrompt(list[int]):
    """A prompt that counts how often its tokens are read one after another."""

    num_read = 0

    def __iter__(self) -> Iterator[int]:
        self.num_read += 1
        return super().__iter__()


def test_prompt_is_not_read_anew_for_each_choice(plain: Engine) -> None:
    prompt = CountedPrompt([3, 4, 5] * 10)
    plain.add(EngineRequest("counted", prompt, SamplingParams(n=16, max_tokens=1), seed=1))
    plain.abort("counted")
    assert prompt.num_read < 8
