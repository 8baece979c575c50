"""Adapters in the engine: chosen by request, more adapters than slots, never mixed up in the prefix cache."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.cover import examples
from fakes.engine_runs import TORCH, drain, tokens_of
from fakes.prompts import mixed_prompts
from fakes.schedules import BLOCK_SIZE, check_plan, new_scheduler, new_sequence
from fakes.ties import num_departures
from fixtures.random_adapters import make_adapter, merge
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from penstock.contract.adapters import AdapterRef
from penstock.contract.errors import NotFoundError, RequestError
from penstock.contract.job import SamplingParams
from penstock.gpu_node.engine import Engine
from penstock.gpu_node.engine.policy.policy import AdapterSlots, ByAdapter, FirstComeFirstServed
from penstock.gpu_node.engine.records import EngineRequest
from penstock.gpu_node.model.lora import library
from penstock.gpu_node.model.lora.library import WEIGHTS_FILE

MakeEngine = Callable[..., Engine]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
NAMES = ("a", "b", "c", "d", "e")


@pytest.fixture(scope="module")
def adapters(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of five adapters of the tiny model."""
    folder = tmp_path_factory.mktemp("adapters")
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    for seed, name in enumerate(NAMES):
        make_adapter(folder / name, base, seed=seed)
    return folder


def _merged(tiny_model: Path, adapters: Path, name: str | None) -> Any:
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    return model if name is None else merge(model, adapters / name)


@pytest.mark.parametrize("policy", ["fcfs", "fair"])
def test_more_adapters_than_slots_all_run(
    make_engine: MakeEngine, tiny_model: Path, adapters: Path, policy: str
) -> None:
    engine = make_engine(
        **TORCH, lora_dir=adapters, max_loras=2, max_num_seqs=8, num_kv_blocks=48, scheduling_policy=policy
    )
    prompts = [prompt[:60] for prompt in mixed_prompts(engine, 12)]
    wanted = [(*NAMES, None)[i % 6] for i in range(len(prompts))]
    generations = engine.generate(prompts, GREEDY, adapters=wanted)
    for name in (*NAMES, None):
        pairs = [
            (one.prompt_token_ids, one.choices[0].token_ids)
            for one, its in zip(generations, wanted, strict=True)
            if its == name
        ]
        assert num_departures(_merged(tiny_model, adapters, name), pairs) <= 1
    engine.check_integrity()


def test_a_prompt_shares_its_cached_prefix_with_those_of_its_adapter_only(
    make_engine: MakeEngine, adapters: Path
) -> None:
    engine = make_engine(lora_dir=adapters, max_loras=1)
    prompt = list(range(3, 103))
    said, cached = {}, []
    for name in ("a", None, "b", "a"):
        (generation,) = engine.generate([prompt], GREEDY, adapters=name)
        cached.append(generation.usage.cached_tokens)
        assert said.setdefault(name, generation.choices[0].token_ids) == generation.choices[0].token_ids
    assert cached == [0, 0, 0, 96]
    assert len(set(said.values())) == 3


def test_only_requests_for_missing_adapters_are_refused(make_engine: MakeEngine, adapters: Path) -> None:
    engine = make_engine(lora_dir=adapters)
    assert sorted(engine.adapters()) == sorted(NAMES)
    for adapter, kind in ((AdapterRef(name="z"), NotFoundError), (AdapterRef(name="a", digest="0" * 32), RequestError)):
        with pytest.raises(kind):
            engine.add(EngineRequest("x", [1, 2, 3], GREEDY, seed=0, adapter=adapter))
    assert not engine.has_work()
    with pytest.raises(NotFoundError, match="known adapters: none"):
        make_engine().add(EngineRequest("x", [1, 2, 3], GREEDY, seed=0, adapter=AdapterRef(name="a")))


class _Named:
    def __init__(self, digest: str) -> None:
        self.digest = digest


class _Table:
    """The slots of a runner."""

    def __init__(self) -> None:
        self.places: dict[int, str] = {}

    def set_adapter(self, place: int, adapter: Any) -> None:
        self.places[place] = adapter.digest


@settings(max_examples=examples(60))
@given(
    wearers=st.lists(st.sampled_from(("", "a", "b", "c", "d")), min_size=1, max_size=24),
    num_places=st.integers(1, 3),
    lengths=st.integers(1, 6),
    num_blocks=st.integers(7, 20),
)
def test_every_step_computes_with_the_adapters_of_its_sequences_and_all_end(
    wearers: list[str], num_places: int, lengths: int, num_blocks: int
) -> None:
    places, table = AdapterSlots(num_places), _Table()
    policy = ByAdapter(FirstComeFirstServed(), places)
    scheduler, _ = new_scheduler(num_blocks, max_num_seqs=6, policy=policy)
    known = {name: _Named(name) for name in "abcd"}
    for i, name in enumerate(wearers):
        seq = new_sequence(str(i), 1 + i % (3 * BLOCK_SIZE), 1 + lengths * (i % 3), first_token=100 * i)
        seq.adapter = known.get(name)
        scheduler.add(seq)
    left = len(wearers)
    while left:
        step = scheduler.schedule()
        assert step is not None
        places.load_pending(table)
        plan = check_plan(scheduler, step, 16)
        for i, seq in enumerate(step.seqs):
            place = -1 if plan.adapters is None else int(plan.adapters[i])
            assert table.places.get(place) == (seq.adapter.digest if seq.adapter else None)
        landed = scheduler.commit(step, plan.sample_tokens * 0 + 7)
        left -= len(landed.ended)
    assert scheduler.schedule() is None
    scheduler.check_integrity()


def test_request_that_waits_for_a_slot_gets_one_although_others_keep_arriving() -> None:
    places = AdapterSlots(1)
    scheduler, _ = new_scheduler(40, max_num_seqs=4, policy=ByAdapter(FirstComeFirstServed(), places))
    known = {name: _Named(name) for name in "ab"}

    def add(name: str, adapter: str) -> None:
        seq = new_sequence(name, 2, 3)
        seq.adapter = known[adapter]
        scheduler.add(seq)

    add("first", "a")
    add("second", "b")
    seen: list[str] = []
    for i in range(12):
        add(f"more {i}", "a")
        step = scheduler.schedule()
        assert step is not None
        seen += [seq.request_id for seq in step.seqs]
        scheduler.commit(step, step.sampled * 0 + 7)
    assert "second" in seen


def test_a_prepared_adapter_is_not_read_again_although_others_were_read_since(
    make_engine: MakeEngine, adapters: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "_MAX_KEPT", 1)
    for name in "ab":
        shutil.copytree(adapters / name, tmp_path / name)
    engine = make_engine(lora_dir=tmp_path, max_loras=1)
    first, other = (AdapterRef(name=name, digest=engine.adapters()[name]) for name in "ab")
    prepared = engine.prepare(GREEDY, first)
    engine.prepare(GREEDY, other)
    shutil.rmtree(tmp_path / "a")
    engine.add(EngineRequest("x", [5, 6, 7], GREEDY, seed=0, adapter=first, prepared=prepared))
    want = make_engine(lora_dir=adapters, max_loras=1).generate([[5, 6, 7]], GREEDY, adapters="a")[0]
    assert tuple(tokens_of(drain(engine), "x")) == want.choices[0].token_ids


def test_running_request_keeps_its_adapter_when_the_file_is_overwritten(
    make_engine: MakeEngine, adapters: Path, tmp_path: Path
) -> None:
    for name in "ab":
        shutil.copytree(adapters / name, tmp_path / name)
    engine = make_engine(lora_dir=tmp_path, max_loras=1)
    prompts, began_with = [[5, 6, 7] * 7], AdapterRef(name="a", digest=engine.adapters()["a"])
    want = engine.generate(prompts, GREEDY, adapters="a")[0].choices[0].token_ids
    other = engine.generate(prompts, GREEDY, adapters="b")[0].choices[0].token_ids  # which takes the only place
    weights = tmp_path / "a" / WEIGHTS_FILE
    for content in ((tmp_path / "b" / WEIGHTS_FILE).read_bytes(), b""):
        weights.write_bytes(content)
        params = GREEDY.model_copy(update={"cache_salt": f"{len(content)} bytes"})
        engine.add(EngineRequest("old", prompts[0], params, seed=0, adapter=began_with))
        assert tuple(tokens_of(drain(engine), "old")) == want != other
        assert engine.generate(prompts, GREEDY, adapters="b")[0].choices[0].token_ids == other
