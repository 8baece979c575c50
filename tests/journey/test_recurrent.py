"""A model with recurrent layers through the front door: from a folder, and from a GGUF file."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from fakes.served_model import served
from fakes.ties import num_departures
from fixtures.gguf_file import write_gguf
from fixtures.random_families import make_family_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock.contract.job import SamplingParams
from penstock.gpu_node.engine import Engine, EngineConfig

BLOCK_SIZE = 16
NUM_CHATS, NUM_SLOTS, NUM_AT_ONCE = 64, 16, 24
SYSTEM_TOKENS, ANSWER_TOKENS, MESSAGE_TOKENS = 2000, 9, 21
OPTIONS = {"runner": "native", "num_kv_blocks": 2000, "block_size": BLOCK_SIZE, "max_model_len": 2304}
TEXT = "The gate opens by pressure, and the turbine never starves. " * 3


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3.5": ("qwen35", {}),
    "qwen3.5 moe": ("qwen35moe", {}),
    "qwen3 next": ("qwen3next", {"mlp_only_layers": []}),
    "lfm2": ("lfm2", {}),
    "lfm2 moe": ("lfm2moe", {}),
    "lfm3": ("", {}),
    "granite hybrid": ("granitehybrid", {}),
    "granite hybrid moe": ("granitehybrid", {}),
    "nemotron h": ("", {}),
    "nemotron h moe": ("nemotron_h_moe", {}),
    "falcon h1": ("falcon-h1", {}),
}
"""By family: what its GGUF files name, if llama.cpp reads any, and settings of the folder."""


MIXTURE_GAP = 0.3
"""Where a router's scores nearly tie, rounding chooses another expert."""


def _sources() -> Iterator[Any]:
    """Yield a family, and what is served of it. Only the first one is served in each run."""
    for at, (name, (architecture, _)) in enumerate(FAMILIES.items()):
        for kind in ("folder", "file") if architecture else ("folder",):
            yield pytest.param(name, kind, marks=pytest.mark.slow if at else (), id=f"{name}, {kind}")


@pytest.mark.parametrize(("name", "kind"), [*_sources()])
def test_a_hybrid_model_answers_over_http_as_transformers_does(tmp_path: Path, name: str, kind: str) -> None:
    architecture, changes = FAMILIES[name]
    folder = make_family_model(tmp_path / "small", name, "bfloat16", **changes)
    path = write_gguf(folder, tmp_path / "small.gguf", architecture) if kind == "file" else folder
    module: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    options = {"runner": "native", "num_kv_blocks": 64, "max_num_seqs": 2, "max_model_len": 256}
    body = {"prompt": TEXT, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    with served(path, **options) as url:
        body["model"] = httpx.get(f"{url}/v1/models", timeout=60).json()["data"][0]["id"]
        # Beside the measurement of a node that has just started, few slots may hold no snapshot of the first prompt.
        answers = [httpx.post(f"{url}/v1/completions", json=body, timeout=120).json() for _ in range(3)]
    cold, again, warm = (answer["choices"][0]["token_ids"] for answer in answers)
    assert answers[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    prompt = tokenizer.encode(TEXT)
    with torch.inference_mode():
        max_gap = MIXTURE_GAP if "moe" in name or name == "qwen3 next" else 0.05
        assert num_departures(module, [(prompt, cold)], max_gap=max_gap) <= 1
    assert warm == again == cold


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model."""
    return make_family_model(tmp_path_factory.mktemp("hybrid") / "small", "qwen3.5", "bfloat16")


class Chats:
    """Token ids to a server and back, beside an engine that computes each prompt alone and whole."""

    def __init__(self, http: httpx.Client, alone: Engine) -> None:
        self._http, self._alone = http, alone
        self._model = http.get("/v1/models").json()["data"][0]["id"]

    def answer(self, prompt: list[int]) -> tuple[list[int], int]:
        """Return the tokens of a greedy answer, and how many tokens of the prompt were cached."""
        body = {"model": self._model, "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0}
        found = self._http.post("/v1/completions", json=body | {"ignore_eos": True, "return_token_ids": True}).json()
        return found["choices"][0]["token_ids"], found["usage"]["prompt_tokens_details"]["cached_tokens"]

    def answer_alone(self, prompt: list[int]) -> list[int]:
        """Return the same answer of an engine without a prefix cache and with one sequence at a time."""
        greedy = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
        [generation] = self._alone.generate([prompt], greedy)
        return list(generation.token_ids)

    def node(self) -> dict[str, Any]:
        """Return the record of the one node."""
        [[node]] = self._http.get("/health/nodes").json().values()
        return dict(node)


@pytest.fixture(scope="module")
def chats(folder: Path) -> Iterator[Chats]:
    """A server whose slots hold the states of 8 sequences and as many snapshots."""
    settings = {"enable_prefix_caching": False, "max_num_seqs": 1, "num_threads": 1}
    alone = Engine(EngineConfig(model=str(folder), **OPTIONS, **settings))
    with served(folder, **OPTIONS, max_num_seqs=NUM_SLOTS // 2) as url, httpx.Client(base_url=url, timeout=120) as http:
        yield Chats(http, alone)


def test_a_long_system_prompt_is_not_computed_from_the_third_request_on(chats: Chats) -> None:
    rng = random.Random(1)
    system = rng.choices(range(384), k=SYSTEM_TOKENS)
    cached = []
    for _ in range(4):
        prompt = system + rng.choices(range(384), k=40)
        tokens, count = chats.answer(prompt)
        assert tokens == chats.answer_alone(prompt)
        cached.append(count)
    assert cached == [0, 0, SYSTEM_TOKENS, SYSTEM_TOKENS]


def test_the_next_turn_of_a_chat_computes_at_most_32_tokens_beside_the_new_message(chats: Chats) -> None:
    rng = random.Random(2)
    chat = rng.choices(range(384), k=100)
    for turn in range(6):
        tokens, cached = chats.answer(chat)
        assert tokens == chats.answer_alone(chat)
        assert not turn or len(chat) - cached - MESSAGE_TOKENS <= 2 * BLOCK_SIZE
        chat += [*tokens, *rng.choices(range(384), k=MESSAGE_TOKENS)]


def test_many_chats_in_few_slots_get_the_right_tokens_and_evictions_are_shown(chats: Chats) -> None:
    rng = random.Random(3)
    texts = [rng.choices(range(384), k=rng.randint(20, 70)) for _ in range(NUM_CHATS)]
    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        for _ in range(3):
            for text, (tokens, _) in zip(texts, pool.map(chats.answer, texts), strict=True):
                assert tokens == chats.answer_alone(text)
                text += [*tokens, *rng.choices(range(384), k=rng.randint(3, 30))]
    node = chats.node()
    assert node["state_slots_total"] == NUM_SLOTS
    assert node["state_snapshots"] <= NUM_SLOTS
    assert node["state_evictions"] > 0
