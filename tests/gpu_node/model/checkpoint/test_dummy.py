"""Random weights: the names and folders that define a shape, and the distribution of the values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes.runners.runner_options import runner_options
from fixtures.random_families import RECURRENT_FAMILIES

from penstock.contract.errors import ConfigError
from penstock.contract.job import SamplingParams
from penstock.gpu_node.engine import Engine
from penstock.gpu_node.model.architecture.families import family_of
from penstock.gpu_node.model.checkpoint.dummy import SHAPES, RandomWeights, dummy_folder
from penstock.gpu_node.model.checkpoint.source import ModelSource
from penstock.gpu_node.model.checkpoint.stored_tensors import Checkpoint
from penstock.gpu_node.model.loading.load import load_model

SETTINGS: dict[str, Any] = {"load_format": "dummy", "num_kv_blocks": 32, "num_threads": 1}


@pytest.mark.parametrize("name", SHAPES)
def test_a_known_shape_is_that_of_the_model(name: str) -> None:
    spec = family_of(SHAPES[name]).spec_of(SHAPES[name])
    (attention,), (mlp,) = spec.attentions, spec.mlps
    of_layer = spec.hidden_size * (2 * attention.queries + 2 * attention.keys + 3 * mlp.intermediate_size)
    tables = (1 if spec.tied_head else 2) * spec.vocab_size * spec.hidden_size
    billions = round((spec.num_layers * of_layer + tables) / 1e9, 2)
    assert billions == {"llama-8b": 8.03, "llama-3b": 3.21, "llama-1b": 1.24, "qwen3-0.6b": 0.6, "tiny": 0.0}[name]


@pytest.mark.parametrize("runner", ["native", "torch", "gpu"])
def test_every_runner_computes_with_random_weights(runner: str) -> None:
    # The interpreter of the GPU kernels is exact in float32 only, unless it is mended.
    given = SETTINGS | ({"dtype": "float32"} if runner == "gpu" else {})
    engine = Engine("tiny", runner=runner, max_num_seqs=2, max_num_batched_tokens=32, **given)
    params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    (first, second) = engine.generate(["The gate", "opens"], params)
    assert len(first.token_ids) == len(second.token_ids) == 5
    assert first.token_ids != second.token_ids
    assert first.prompt_token_ids == tuple(engine.tokenizer.encode("The gate"))


def test_a_folder_gives_its_shape_and_its_tokenizer(tmp_path: Path, tiny_model: Path) -> None:
    """Its weights are not read: they may be absent."""
    folder = tmp_path / "shape"
    folder.mkdir()
    config = json.loads((tiny_model / "config.json").read_text()) | {"num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    assert dummy_folder(str(folder)) != folder
    loaded = load_model(str(folder), runner_options(load_format="dummy"), lambda *_: None)
    assert (loaded.hidden_size, loaded.vocab_size) == (64, config["vocab_size"])
    assert loaded.arithmetic.endswith("-dummy")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tiny_model / name).read_bytes())
    assert dummy_folder(str(folder)) == folder


def test_the_config_of_a_model_for_images_gives_the_shape_of_its_text_model(tmp_path: Path) -> None:
    text = RECURRENT_FAMILIES["qwen3.5"][1] | {"model_type": "qwen3_5_text", "vocab_size": 300, "dtype": "bfloat16"}
    config = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config))
    engine = Engine(str(tmp_path), runner="native", max_num_seqs=1, **SETTINGS)
    (answer,) = engine.generate(["The gate"], SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True))
    assert len(answer.token_ids) == 5
    assert json.loads((dummy_folder(str(tmp_path)) / "config.json").read_text()) == config


@pytest.mark.parametrize(
    ("model", "config", "message"),
    [
        (
            "llama-7b",
            None,
            "llama-7b is no folder with a config.json and none of llama-8b, llama-3b, llama-1b, qwen3-0.6b, tiny",
        ),
        ("folder", {"vocab_size": 100}, "vocab_size is 100 but must be at least 259"),
        (
            "folder",
            {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": {"vocab_size": 100}},
            "vocab_size is 100 but must be at least 259",
        ),
    ],
)
def test_model_without_a_usable_shape_is_refused(
    model: str, config: dict[str, Any] | None, message: str, tmp_path: Path
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
        model = str(tmp_path)
    with pytest.raises(ConfigError, match=message):
        load_model(model, runner_options(load_format="dummy"), lambda *_: None)


def test_a_revision_is_refused() -> None:
    with pytest.raises(ConfigError, match="revision main is only for models of the hub"):
        load_model("tiny", runner_options(load_format="dummy"), lambda *_: None, revision="main")


def test_random_matrices_keep_the_scale_of_activations() -> None:
    checkpoint = Checkpoint.open(ModelSource(Path("none"), is_dummy=True))
    matrix = checkpoint.get("model.layers.0.mlp.up_proj.weight", 300, 400).to_float32()
    assert abs(matrix.std() * 400**0.5 - 1) < 0.02
    assert abs(matrix.mean()) < 1e-3
    assert not np.array_equal(matrix, checkpoint.get("model.layers.1.mlp.up_proj.weight", 300, 400).to_float32())
    assert (checkpoint.get("model.norm.weight", 5).to_float32() == 1).all()
    assert (checkpoint.get("model.norm.bias", 5).to_float32() == 0).all()


def test_matrix_larger_than_the_drawn_numbers_has_no_equal_rows() -> None:
    columns = 4096
    rows = RandomWeights().tensor("large", (2060, columns)).view(np.uint16).reshape(-1, columns)
    assert len(np.unique(rows[:, :8], axis=0)) == len(rows)
