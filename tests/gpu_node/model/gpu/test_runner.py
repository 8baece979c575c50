"""The GPU runner gives the torch runner's results, for every family and in any mixture of steps."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes.prompts import mixed_prompts
from fakes.runners.runner_options import runner_options
from fixtures.plans import Track, logits_of_step, plan_of
from fixtures.random_families import ORIGINAL_LENGTH, WINDOW, make_family_model
from fixtures.sampling import rows_of
from fixtures.small_transformers import quiet
from fixtures.whole_models import make_whole_model
from numpy.typing import NDArray

from penstock.contract.job import SamplingParams
from penstock.gpu_node.engine import Engine, EngineConfig
from penstock.gpu_node.model.loading.load import load_model
from penstock.gpu_node.model.protocol import NO_LOGPROBS, PooledTokens, ScoredTokens, TokenMasks

WINDOWED = ("mistral", "qwen2 with windows")
ALTERNATING: dict[str, dict[str, Any]] = {
    "gemma2": {},
    "gemma3": {"layer_types": ["sliding_attention", "full_attention"]},
    "cohere2": {"layer_types": ["sliding_attention", "full_attention"]},
    "smollm3": {"no_rope_layers": [1, 0]},
}
"""Families whose layers differ in windows or positions, and what makes the first two layers differ."""
FEATURES = (
    *("llama", *WINDOWED, *ALTERNATING, "qwen3", "granite", "olmo2", "olmo3", "starcoder2", "phi3"),
    *("falcon 7b", "falcon 40b", "falcon rw", "gpt-neox sequential", "gpt2"),
)
"""Of all the models those that differ in what the kernels are asked for; angles are tables."""
OPTIONS: dict[str, Any] = {"block_size": 8, "num_kv_blocks": 20, "max_model_len": 128}


def _runner(folder: Path, runner: str, **options: Any) -> Any:
    return load_model(str(folder), runner_options(runner=runner, **OPTIONS | options), lambda *_: None).runner


def _logits(runner: Any, length: int = 7) -> NDArray[np.float32]:
    """Return the logits of a sequence computed in chunks, in a batch with another one, and at last token by token."""
    token_ids = random.Random(0).choices(range(300), k=length + 2)
    one, other = Track(token_ids, [3, 17, 5, 11, 8, 1]), Track(token_ids[::-1], [2, 4, 6, 7, 9, 10])
    parts = [logits_of_step(runner, [(one, length - 4)])[0], logits_of_step(runner, [(other, 2), (one, 4)])[1]]
    parts += [logits_of_step(runner, [(one, 1), (other, count)])[0] for count in (1, 3)]
    return np.concatenate(parts)


@pytest.mark.parametrize("name", FEATURES)
def test_logits_equal_those_of_the_torch_runner(name: str, tmp_path: Path) -> None:
    num_layers = 2 if name in ("llama", *WINDOWED, *ALTERNATING) else 1
    folder = make_family_model(tmp_path, name, num_hidden_layers=num_layers, **ALTERNATING.get(name, {}))
    length = WINDOW + 3 if name in (*WINDOWED, "gemma2", "gemma3") else 7
    want, got = (_logits(_runner(folder, runner), length) for runner in ("torch", "gpu"))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)


def test_queries_grow_with_their_positions(tmp_path: Path) -> None:
    with quiet():
        make_whole_model(tmp_path, "ministral3")
    token_ids, found = random.Random(0).choices(range(300), k=ORIGINAL_LENGTH + 8), []
    for name in ("torch", "gpu"):
        runner, track = _runner(tmp_path, name), Track(token_ids, range(1, 14))
        steps = (ORIGINAL_LENGTH + 1, 5, 1, 1)
        found.append(np.concatenate([logits_of_step(runner, [(track, count)])[0] for count in steps]))
    np.testing.assert_allclose(found[1], found[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "most"),
    [({"kv_cache_dtype": "fp8"}, 0.2), ({"quantization": "int8"}, 0.2), ({"quantization": "fp8"}, 0.2)],
)
def test_errors_of_quantized_formats_are_small(options: dict[str, str], most: float, tiny_model: Path) -> None:
    want = _logits(_runner(tiny_model, "torch"))
    error = _logits(_runner(tiny_model, "gpu", **options)) - want
    assert 0 < np.sqrt(np.square(error).mean() / want.var()) < most


RULES: dict[str, list[dict[str, Any]]] = {
    "plain": [
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"top_k": 3, "top_p": 0.9},
        {"frequency_penalty": 0.5, "repetition_penalty": 1.2, "min_tokens": 4},
    ],
    "adjusted": [
        {"temperature": 0.0, "logit_bias": {5: 100.0, 6: 99.0}, "presence_penalty": 2.0},
        {"temperature": 0.8},
        {"temperature": 0.8, "structured_outputs": {"regex": "[a-c]{3}x*"}, "ignore_eos": False},
        {"temperature": 0.0, "structured_outputs": {"regex": "[a-c]{3}x*"}, "ignore_eos": False},
    ],
}


def _generations(
    folder: Path, runner: str, rules: list[dict[str, Any]]
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return greedy, sampled and penalized outputs of one batch, with too few blocks for all of them."""
    engine = Engine(
        EngineConfig(
            model=str(folder),
            runner=runner,
            dtype="float32",
            block_size=8,
            num_kv_blocks=5,
            num_swap_blocks=30,
            preemption="swap",
            max_num_seqs=4,
            max_num_batched_tokens=24,
            max_model_len=256,
        )
    )
    prompts = [prompt[:14] for prompt in mixed_prompts(engine, 4)]
    params = [
        SamplingParams(**{"max_tokens": 7, "ignore_eos": True, "seed": i, **rules[i]}) for i in range(len(prompts))
    ]
    generations = engine.generate(prompts, params)
    stats = engine.stats()
    engine.check_integrity()
    assert min(stats.num_swaps, stats.copied_blocks) > 0
    return [(generation.prompt_token_ids, generation.choices[0].token_ids) for generation in generations]


@pytest.mark.parametrize("rules", RULES)
def test_engine_generates_the_same_tokens_on_the_gpu_runner(tiny_model: Path, rules: str) -> None:
    want, got = (_generations(tiny_model, runner, RULES[rules]) for runner in ("torch", "gpu"))
    assert got == want


def _two_steps(runner: Any, *, ahead: bool) -> list[list[int]]:
    prompts, blocks = ([5, 6, 7, 8], [9, 9, 7]), ([1, 2], [3, 4])
    tracks = [Track(prompt, place) for prompt, place in zip(prompts, blocks, strict=True)]
    first = runner.submit(plan_of([(track, track.left) for track in tracks], rows_of(2, seed=[1, 2], position=0)))
    said = [-1, -2] if ahead else first.result().tokens.tolist()
    longer = [Track([*prompts[i], said[i]], blocks[i], len(prompts[i])) for i in (1, 0)]
    second = runner.submit(plan_of([(track, 1) for track in longer], rows_of(2, seed=[2, 1], position=1)))
    return [handle.result().tokens.tolist() for handle in (first, second)]


def test_a_step_may_be_submitted_before_the_tokens_ahead_of_it_are_known(tiny_model: Path) -> None:
    runner = _runner(tiny_model, "gpu")
    assert _two_steps(runner, ahead=True) == _two_steps(runner, ahead=False)
    assert _two_steps(_runner(tiny_model, "gpu", deterministic=True), ahead=False) == _two_steps(runner, ahead=False)


def test_block_table_of_a_whole_context_fits_although_it_is_not_aligned(tiny_model: Path) -> None:
    """One sequence at the end of three blocks, as a replayed step and as the chunk that computes the same."""
    prompt = [5, 6, 7, 8, 9] * 4
    runner = _runner(tiny_model, "gpu", max_num_seqs=1, max_model_len=24)
    alone, whole = (Track([*prompt, 11], [1, 2, 3], done) for done in (len(prompt), 0))
    rows = rows_of(1, temperature=0.0, position=0)
    want = runner.submit(plan_of([(whole, len(prompt) + 1)], rows)).result().tokens
    assert runner.submit(plan_of([(alone, 1)], rows)).result().tokens.tolist() == want.tolist()


def test_blocks_are_copied_where_the_host_has_none(tiny_model: Path) -> None:
    """As a choice that shares its prompt with others takes a block of its own."""
    prompt, rows = [5, 6, 7, 8, 9], rows_of(1, temperature=0.0, position=0)
    runner = _runner(tiny_model, "gpu", num_swap_blocks=0)
    runner.submit(plan_of([(Track(prompt, [1]), len(prompt))], rows)).result()
    said = [
        runner.submit(plan_of([(Track([*prompt, 11], blocks, len(prompt)), 1)], rows, copies)).result().tokens.tolist()
        for blocks, copies in (([2], [(1, 2)]), ([1], []))
    ]
    assert said[0] == said[1]


def test_logprobs_equal_those_of_the_torch_runner(tiny_model: Path) -> None:
    """Of sampled tokens and of a prompt's, one row with a mask among them."""
    allowed = np.arange(384) % 2 == 0
    track, other = Track([5, 6, 7, 8], [1, 2]), Track([9, 9, 7], [3])
    sampling = rows_of(2, temperature=[0.0, 1.0], mask=[allowed, None])
    scored = ScoredTokens(*(np.array(ints, np.int32) for ints in ([0, 1, 2], [6, 7, 8], [2, 0, 1], [0, 0, 0])))
    plan = plan_of([(track, 4), (other, 3)], replace(sampling, num_logprobs=np.array([4, NO_LOGPROBS], np.int32)))
    for one in (plan, replace(plan, scored=scored)):
        want, got = (_runner(tiny_model, runner).submit(one).result() for runner in ("torch", "gpu"))
        assert got.tokens.tolist() == want.tokens.tolist()
        pairs = [(want.logprobs, got.logprobs, [1 + 4])]
        if one.scored is not None:
            pairs.append((want.scores, got.scores, [1 + 2, 1, 1 + 1]))
        for mine, theirs, widths in pairs:
            for row, width in enumerate(widths):
                assert theirs.token_ids[row, :width].tolist() == mine.token_ids[row, :width].tolist()
                np.testing.assert_allclose(theirs.values[row, :width], mine.values[row, :width], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "falcon 7b"])
def test_hidden_states_equal_those_of_the_torch_runner(name: str, tmp_path: Path) -> None:
    """Of a prompt's tokens, beside a sequence that decodes and tokens that are scored."""
    folder = make_family_model(tmp_path, name)
    track, other = Track([5, 6, 7, 8], [1, 2]), Track([9, 9, 7], [3])
    tokens, seqs = (np.array(ints, np.int32) for ints in ([0, 1, 3, 6], [0, 0, 0, 1]))
    scored = ScoredTokens(*(np.array(ints, np.int32) for ints in ([4], [9], [1], [1])))
    plan = plan_of([(track, 4), (other, 3)], rows_of(2, temperature=0.0))
    plan = replace(plan, scored=scored, pooled=PooledTokens(tokens, seqs))
    want, got = (_runner(folder, runner).submit(plan).result() for runner in ("torch", "gpu"))
    assert want.hidden is not None
    assert got.hidden is not None
    np.testing.assert_allclose(got.hidden, want.hidden, rtol=0, atol=1e-4)
    assert got.tokens.tolist() == want.tokens.tolist()
    assert want.scores is not None
    assert got.scores is not None
    np.testing.assert_allclose(got.scores.values, want.scores.values, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        torch.AcceleratorError("CUDA error: out of memory", 2),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_out_of_memory_is_recognized_and_the_next_step_is_computed(
    error: RuntimeError, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(*_: Any) -> Any:
        raise error

    runner = _runner(tiny_model, "gpu")
    plan = plan_of([(Track([5, 6, 7, 8], [1, 2]), 4)], rows_of(1, position=0))
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(runner._decoder, "logits", out_of_memory)
        runner.submit(plan)
    want = _runner(tiny_model, "gpu").submit(plan).result().tokens
    assert runner.submit(plan).result().tokens.tolist() == want.tolist()


def test_out_of_memory_for_masks_is_recognized(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that waits for a step also gives the device the kernels that read masks."""

    def out_of_memory(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    runner = _runner(tiny_model, "gpu")
    monkeypatch.setattr(runner._row_marks, "reserve", out_of_memory)
    allowed = np.arange(384) % 2 == 0
    flight = runner.submit(plan_of([(Track([5, 6, 7, 8], [1, 2]), 4)], rows_of(1, position=0, mask=[allowed])))
    with pytest.raises(MemoryError):
        flight.result()


def test_masks_may_be_written_while_the_step_runs(tiny_model: Path) -> None:
    """One with prompts, and one that is replayed."""
    runner = _runner(tiny_model, "gpu")
    allowed = np.zeros(384, bool)
    allowed[[7, 300]] = True
    rows = rows_of(2, seed=[1, 2], mask=[None, allowed])
    assert rows.masks is not None
    prompts = [Track([5, 6, 7], [1]), Track([9, 9], [2])]
    for tracks in (prompts, [Track([*track.token_ids, 5], track.blocks, len(track.token_ids)) for track in prompts]):
        late = TokenMasks(np.array([False, True]), 384)
        flight = runner.submit(plan_of([(track, track.left) for track in tracks], replace(rows, masks=late)))
        late.words[:] = rows.masks.words
        late.finish()
        assert flight.result().tokens[1] in (7, 300)


def test_deterministic_runner_splits_a_context_the_same_in_any_batch(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a context is cut into more parts the fewer there are."""
    monkeypatch.setattr("penstock.kernels.triton.decode_attention.num_multiprocessors", lambda _: 132)
    one, other = Track([5, 6, 7], [1], 2), Track([5, 6], [2], 1)
    by = {}
    for deterministic in (False, True):
        runner = _runner(tiny_model, "gpu", deterministic=deterministic)
        cuts: set[int] = set()
        monkeypatch.setattr(
            runner._decoder, "hidden", lambda *given, cuts=cuts: cuts.add(given[3]) or torch.zeros(1, 64)
        )
        for company in ([], [other] * 20):
            runner.logits(plan_of([(track, 1) for track in (one, *company)]))
        by[deterministic] = len(cuts)
    assert by == {False: 2, True: 1}
