"""What the runner of transformers' modules refuses, by name, and before it takes memory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes.runners.runner_options import runner_options
from safetensors.numpy import load_file, save_file

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.loading.load import find_model, load_model

Folder = Callable[[str], Path]
ARCHITECTURE = "ArceeForCausalLM"
ROPE = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}


@pytest.fixture
def folder(class_folder: Folder, tmp_path: Path) -> Path:
    """A copy of a small model, for the test to change."""
    return Path(shutil.copytree(class_folder(ARCHITECTURE), tmp_path / "copy"))


def change(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def refusal(folder: Path, **options: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        load_model(str(folder), runner_options(**{"runner": "auto"} | options), lambda *_: None)
    return refused.value.message


def test_a_checkpoint_without_some_tensors_is_refused_by_their_names(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    del tensors[name]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert name in refusal(folder)


@pytest.mark.slow
def test_a_config_that_asks_for_much_more_than_the_checkpoint_has_takes_no_memory(folder: Path) -> None:
    change(folder, num_hidden_layers=1000, hidden_size=4096, intermediate_size=65_536)
    assert "numbers more than the checkpoint has" in refusal(folder)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"num_hidden_layers": 100_000}, "num_hidden_layers"),
        ({"a_size_that_nobody_knows": 1 << 40}, "a_size_that_nobody_knows"),
        ({"inner": {"parts": [{"depth": 1 << 40}]}}, "inner.parts.depth"),
        ({"vocab_size": 1 << 30}, "vocab_size"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized"),
        ({"rope_parameters": ROPE | {"original_max_position_embeddings": 64}}, "rope_type dynamic"),
    ],
)
def test_a_config_is_refused_by_the_field(folder: Path, fields: dict[str, Any], named: str) -> None:
    change(folder, **fields)
    # The length is above that which the rotations were made for.
    assert named in refusal(folder, max_model_len=None)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"lora": {"sql": Path("/nowhere")}}, "lora"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ({"quantization": "int8"}, "quantization"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype"),
        ({"max_model_len": 100_000}, "max_model_len"),
    ],
)
def test_settings_that_it_lacks_are_refused_by_name(folder: Path, options: dict[str, Any], named: str) -> None:
    assert named in refusal(folder, **options)


def test_states_need_slots(class_folder: Folder) -> None:
    assert "state_slots" in refusal(class_folder("BambaForCausalLM"), state_slots=0)


def test_code_of_a_checkpoint_never_runs(folder: Path, tmp_path: Path) -> None:
    trace = tmp_path / "ran"
    (folder / "modeling_own.py").write_text(f"open({str(trace)!r}, 'w')\n")
    change(folder, auto_map={"AutoConfig": "modeling_own.C", "AutoModelForCausalLM": "modeling_own.M"})
    load_model(str(folder), runner_options(runner="auto"), lambda *_: None)
    change(folder, architectures=["OwnForCausalLM"])
    assert "code that a checkpoint brings" in refusal(folder)
    assert not trace.exists()


def test_an_unknown_architecture_is_named_with_those_like_it(folder: Path) -> None:
    change(folder, architectures=["Arcee2ForCausalLM"], transformers_version="99.0.0")
    said = refusal(folder)
    assert "Arcee2ForCausalLM" in said
    assert "ArceeForCausalLM" in said
    assert "a newer one may have it" in said
    change(folder, architectures=["GenerationMixin"])
    assert "GenerationMixin" in refusal(folder, runner="transformers")


def test_other_runners_name_the_one_that_may_compute_it(folder: Path) -> None:
    assert "runner transformers may compute it" in refusal(folder, runner="torch")


def test_a_family_of_ours_is_computed_by_it_only_when_asked(tiny_model: Path) -> None:
    chosen, asked = (
        load_model(str(tiny_model), runner_options(runner=runner), lambda *_: None)
        for runner in ("torch", "transformers")
    )
    assert chosen.arithmetic == "torch-float32"
    assert asked.arithmetic.startswith("transformers-")
    assert find_model(str(tiny_model), runner_options(runner="transformers"), lambda *_: None).vocab_size == 384
