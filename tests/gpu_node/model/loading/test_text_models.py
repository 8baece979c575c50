"""The text models inside of models for images: they compute transformers' logits, and the rest is not read."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes.runners.runner_options import runner_options
from fixtures.plans import Track, logits_of_step
from fixtures.random_families import ORIGINAL_LENGTH
from fixtures.small_transformers import quiet
from fixtures.whole_models import OF_TRANSFORMERS, WHOLE, make_whole_model
from numpy.typing import NDArray

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.loading.load import find_model, load_model

Whole = Callable[..., tuple[Path, Any]]
TOKEN_IDS = random.Random(0).choices(range(384), k=200)
MAX_LOGIT_ERROR = 1e-4
EACH_RUN = ("gemma3", "gemma4", "qwen3-vl moe", "ministral3")
"""Those with what the others lack: two RoPEs, shared keys, experts, and queries that grow. They have all namings."""


def sometimes_slow(names: Any) -> list[Any]:
    return [pytest.param(name, marks=() if name in EACH_RUN else pytest.mark.slow) for name in names]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Folder and module of a random model."""

    @cache
    def make(name: str, dtype: str = "float32") -> tuple[Path, Any]:
        folder = tmp_path_factory.mktemp("whole")
        with quiet():
            return folder, make_whole_model(folder, name, dtype)

    return make


@torch.inference_mode()
def wanted(module: Any, token_ids: list[int] = TOKEN_IDS) -> NDArray[np.float32]:
    return np.asarray(module.float()(input_ids=torch.tensor([token_ids])).logits[0])


def logits(folder: Path, token_ids: list[int] = TOKEN_IDS, **options: Any) -> NDArray[np.float32]:
    settings = {"num_kv_blocks": 60, "max_model_len": 250} | options
    runner: Any = load_model(str(folder), runner_options(**settings), lambda *_: None).runner
    (got,) = logits_of_step(runner, [(Track(token_ids, range(1, 20)), len(token_ids))])
    return np.asarray(got)


@pytest.mark.parametrize("name", sometimes_slow(WHOLE))
def test_logits_are_those_of_the_whole_model(whole: Whole, name: str) -> None:
    folder, module = whole(name)
    np.testing.assert_allclose(logits(folder, runner="torch"), wanted(module), rtol=0, atol=MAX_LOGIT_ERROR)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "ministral3" else pytest.mark.slow) for name in WHOLE]
)
def test_the_native_runner_computes_the_text_model(whole: Whole, name: str) -> None:
    """As close to the logits in float32 as transformers is in bfloat16. Queries grow within the text."""
    token_ids = TOKEN_IDS
    folder, module = whole(name, "bfloat16")
    with torch.inference_mode():
        rounded = np.asarray(module(input_ids=torch.tensor([token_ids])).logits[0].float())
    options = {"runner": "native", "dtype": "bfloat16", "weight_cache": False}
    got, exact = logits(folder, token_ids, **options), wanted(module, token_ids)
    assert np.square(got - exact).mean() <= 1.5 * np.square(rounded - exact).mean()


@pytest.mark.parametrize("name", OF_TRANSFORMERS)
def test_transformers_computes_a_text_model_without_a_family(whole: Whole, name: str) -> None:
    folder, module = whole(name)
    found = find_model(str(folder), runner_options(runner="auto", max_model_len=250), lambda *_: None)
    assert found.description.architecture == f"{name}ForCausalLM"
    np.testing.assert_allclose(logits(folder, runner="auto"), wanted(module), rtol=0, atol=MAX_LOGIT_ERROR)


def test_the_native_runner_takes_queries_that_grow_into_account(whole: Whole) -> None:
    """A model without the growth has other logits, but only behind the first tokens, whose queries do not grow."""
    folder, module = whole("ministral3", "bfloat16")
    exact = wanted(module)
    got = logits(folder, runner="native", dtype="bfloat16", weight_cache=False, kv_cache_dtype="int8")
    rope = module.config.text_config.rope_parameters
    assert rope["llama_4_scaling_beta"] > 0
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["rope_parameters"]["llama_4_scaling_beta"] = 0.0
    flat = folder.with_name(f"{folder.name}-flat")
    shutil.copytree(folder, flat)
    (flat / "config.json").write_text(json.dumps(config))
    without = logits(flat, runner="native", dtype="bfloat16", weight_cache=False, kv_cache_dtype="int8")
    np.testing.assert_array_equal(got[:ORIGINAL_LENGTH], without[:ORIGINAL_LENGTH])
    behind = slice(ORIGINAL_LENGTH, None)
    assert np.square(got - exact)[behind].mean() < 0.1 * np.square(without - exact)[behind].mean()


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"text_config": "gemma"}, "text_config is 'gemma' but must be an object"),
        ({"text_config": {"model_type": "bert"}}, "text_config.model_type is 'bert', but Mistral 3 has only mistral"),
        (
            {"architectures": ["PaliGemmaForConditionalGeneration"]},
            "architecture PaliGemmaForConditionalGeneration is not supported",
        ),
    ],
)
def test_a_wrong_text_config_is_refused_by_its_field(
    whole: Whole, tmp_path: Path, fields: dict[str, Any], named: str
) -> None:
    folder = Path(shutil.copytree(whole("ministral3")[0], tmp_path / "copy"))
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(ConfigError, match=named):
        find_model(str(folder), runner_options(runner="torch"), lambda *_: None)
