"""Steps as graphs: which steps have one, how they are padded, and that they compute what eager steps compute."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes.runners.runner_options import runner_options
from fixtures.plans import Track, plan_of
from fixtures.random_adapters import make_adapter
from fixtures.random_families import make_family_model
from fixtures.sampling import rows_of
from transformers import AutoModelForCausalLM

from penstock.contract.adapters import AdapterRef
from penstock.contract.job import SamplingParams
from penstock.gpu_node.engine import Engine, EngineConfig
from penstock.gpu_node.model.gpu.graphs import MIXED_TOKENS, GraphShapes, StepShape, pad_step
from penstock.gpu_node.model.gpu.inputs import Ints, StepInputs, pack_step
from penstock.gpu_node.model.loading.load import load_model
from penstock.gpu_node.model.protocol import NO_ADAPTER

MAX_SEQS = 40


def _packed(rng: random.Random, counts: list[int]) -> StepInputs[Ints]:
    """Return a step of sequences with such numbers of tokens, each with an adapter or none."""
    tracks = [
        Track([1] * (rng.randrange(20) + count), list(range(1, 200)), adapter=rng.choice((NO_ADAPTER, 0, 1)))
        for count in counts
    ]
    for track, count in zip(tracks, counts, strict=True):
        track.done = len(track.token_ids) - count
    rows = rows_of(len(counts), temperature=0.0, position=0)
    return pack_step(plan_of([(track, count) for track, count in zip(tracks, counts, strict=True)], rows), 16)


@pytest.mark.parametrize("seed", range(20))
def test_every_step_of_ordinary_size_has_a_graph(seed: int) -> None:
    rng = random.Random(seed)
    shapes = GraphShapes(MAX_SEQS, 512, has_adapters=True)
    counts = [1] * rng.randint(0, MAX_SEQS - 8) + [rng.randint(2, 60) for _ in range(rng.randint(0, 8))]
    rng.shuffle(counts)
    step = _packed(rng, counts or [1])
    shape = shapes.find(step)
    assert isinstance(shape, StepShape), shape
    assert shape in shapes.all
    assert bool(shape.num_adapter_tiles) == bool(len(step.adapter_tiles))
    if shape.num_tiles:
        smaller = [tokens for tokens in MIXED_TOKENS if tokens < shape.num_tokens]
        assert not smaller or smaller[-1] < len(step.token_ids)
    _assert_padded(step, shape)


@pytest.mark.parametrize("counts", [[32] * 64, [2] * 256, [1] * 100 + [3] * 156, [65] * 39])
def test_many_short_prompts_at_once_have_a_graph_of_as_many_tokens(counts: list[int]) -> None:
    shapes, step = GraphShapes(256, 8192, has_adapters=True), _packed(random.Random(0), counts)
    shape = shapes.find(step)
    assert isinstance(shape, StepShape), shape
    assert shape.num_tokens == min(tokens for tokens in MIXED_TOKENS if tokens >= len(step.token_ids))


def test_few_prompts_take_the_graph_with_fewer_padding_tiles() -> None:
    shapes, rng = GraphShapes(256, 8192, has_adapters=False), random.Random(0)
    few, many = (shapes.find(_plain(_packed(rng, [count] * (510 // count)))) for count in (255, 2))
    assert isinstance(few, StepShape) and isinstance(many, StepShape)
    assert few.num_tokens == many.num_tokens == 512 and few.num_tiles < many.num_tiles


def _assert_padded(step: StepInputs[Ints], shape: StepShape) -> None:
    """Assert that a padded step has the shape's sizes, the step's own values first, and padding that does nothing."""
    padded = pad_step(step, shape)
    sizes = {
        "token_ids": shape.num_tokens,
        "decoding": shape.num_seqs,
        "rules": shape.num_seqs,
        "tiles": shape.num_tiles,
    }
    for name, size in sizes.items():
        assert len(getattr(padded, name)) == size, name
    for name in ("token_ids", "slots", "context_lens", "decoding", "tiles", "sampling", "rules", "adapter_tiles"):
        own, all_of_it = getattr(step, name), getattr(padded, name)
        assert np.array_equal(all_of_it[: len(own)], own), name
    num_tokens, num_seqs = len(step.token_ids), len(step.context_lens)
    assert (padded.slots[num_tokens:] == -1).all()
    assert (np.diff(padded.query_starts)[num_seqs:] == 0).all()
    assert (padded.decoding[len(step.decoding) :] == -1).all()
    assert (padded.tiles[len(step.tiles) :] == -1).all()
    assert (padded.adapter_tiles[len(step.adapter_tiles) :, 2] == 0).all()
    assert padded.sampling.max() < num_tokens


def test_step_without_graph_says_why() -> None:
    shapes, rng = GraphShapes(MAX_SEQS, 4096, has_adapters=False), random.Random(0)
    assert shapes.find(_plain(_packed(rng, [2600]))) == "too_large"
    assert isinstance(shapes.find(_plain(_packed(rng, [2500, 1]))), StepShape)
    scored = _plain(_packed(rng, [5]))
    object.__setattr__(scored, "sampling", np.append(scored.sampling, 3).astype(np.int32))
    assert shapes.find(scored) == "scored_or_pooled_tokens"


def _plain(step: StepInputs[Ints]) -> StepInputs[Ints]:
    """Remove the adapters of a step."""
    object.__setattr__(step, "adapter_tiles", step.adapter_tiles[:0])
    return step


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A runner with two adapters, loaded once."""
    path = tmp_path_factory.mktemp("graphs")
    folder = make_family_model(path / "model", "llama")
    base = AutoModelForCausalLM.from_pretrained(folder)
    make_adapter(path / "adapters" / "all", base, rank=4, seed=1)
    options: dict[str, Any] = {
        "block_size": 8,
        "num_kv_blocks": 20,
        "max_model_len": 128,
        "max_loras": 1,
        "max_lora_rank": 4,
    }
    options |= {"runner": "gpu", "lora_dir": path / "adapters", "max_num_seqs": 8}
    loaded = load_model(str(folder), runner_options(**options), lambda *_: None)
    loaded.runner.set_adapter(0, loaded.adapters.find(AdapterRef(name="all")))
    return loaded.runner


def _steps(runner: Any, adapter: int) -> tuple[list[list[int]], list[str | None]]:
    """Run a prefill step, a mixed step and a decode step; return their tokens and why each ran eagerly."""
    rng = random.Random(1)
    one, other = (
        Track(rng.choices(range(300), k=11), blocks, adapter=place)
        for blocks, place in (([3, 5], adapter), ([7, 2], NO_ADAPTER))
    )
    rules = {"temperature": [0.0, 0.9], "position": 0, "top_p": [1.0, 0.8]}
    parts = [[(one, 9)], [(other, 10), (one, 1)], [(one, 1), (other, 1)]]
    found = []
    for part in parts:
        rows = rows_of(len(part), **{**rules, "temperature": [0.0, 0.9][: len(part)], "top_p": [1.0, 0.8][: len(part)]})
        found.append(runner.submit(plan_of(part, rows)).result())
        for track, count in part:
            track.done += count
    return [result.tokens.tolist() for result in found], [result.eager for result in found]


@pytest.mark.parametrize("adapter", [NO_ADAPTER, 0], ids=["plain", "adapted"])
def test_graph_computes_what_an_eager_step_computes(runner: Any, adapter: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, reasons = _steps(runner, adapter)
    assert reasons == [None, None, None]
    monkeypatch.setattr(runner._graphs, "find", lambda _: "for this test")
    assert _steps(runner, adapter) == (tokens, ["for this test"] * 3)


def test_engine_counts_eager_steps_by_reason(tiny_model: Path) -> None:
    engine = Engine(
        EngineConfig(model=str(tiny_model), runner="gpu", dtype="float32", max_num_seqs=2, max_model_len=64)
    )
    prompt = "A prompt."
    engine.generate([prompt], [SamplingParams(max_tokens=3, ignore_eos=True)])
    assert engine.stats().eager_steps == {}
    engine.generate([prompt], [SamplingParams(max_tokens=3, ignore_eos=True, prompt_logprobs=1)])
    assert engine.stats().eager_steps == {"scored_or_pooled_tokens": 1}


def test_engine_without_graphs_computes_the_same_tokens(tiny_model: Path) -> None:
    generations, eager_steps = [], []
    for enforce_eager in (False, True):
        settings: dict[str, Any] = {
            "runner": "gpu",
            "dtype": "float32",
            "max_num_seqs": 2,
            "max_model_len": 64,
            "num_kv_blocks": 8,
        }
        engine = Engine(str(tiny_model), enforce_eager=enforce_eager, **settings)
        params = SamplingParams(max_tokens=3, ignore_eos=True, seed=1)
        generations.append([one.token_ids for one in engine.generate(["A prompt.", "Another one"], params)])
        eager_steps.append(engine.stats().eager_steps)
    assert generations[0] == generations[1]
    assert eager_steps == [{}, {"enforce_eager": 3}]
