"""Models with recurrent layers as they are published: other names of tensors and fields, and parts that are skipped."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes.runners.runner_options import runner_options
from fakes.transformers_logits import error_of
from fixtures.plans import Track, logits_of_step
from fixtures.quantized_checkpoint import LAYOUTS, write_quantized
from fixtures.random_families import make_family_model
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.loading.load import find_model, load_model

Family = Callable[..., Path]
Tensors = dict[str, torch.Tensor]
Config = dict[str, Any]
TOKEN_IDS = [(7919 * i) % 384 for i in range(1, 71)]
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    """Folder of a random model of a family, in float32."""
    return cache(lambda name: make_family_model(tmp_path_factory.mktemp("family"), name))


def _logits(folder: Path) -> NDArray[np.float32]:
    options = runner_options(runner="torch", num_kv_blocks=16, state_slots=2)
    runner: Any = load_model(str(folder), options, lambda stage, done: None).runner
    slots = getattr(runner.state_sizes, "num_slots", 0)
    track = Track(TOKEN_IDS, range(1, 6), **({"state": 0} if slots else {}))
    (found,) = logits_of_step(runner, [(track, len(TOKEN_IDS))])
    return np.asarray(found)


def _copy(
    folder: Path, target: Path, change: Callable[[Config], None], name_of: Callable[[str], str] = str, **more: Any
) -> Path:
    """Write a model again, with another config, other names of tensors, and further tensors of no layer."""
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (target / "config.json").write_text(json.dumps(config))
    tensors = {name_of(name): tensor for name, tensor in load_file(folder / WEIGHTS).items()}
    save_file(tensors | {name: torch.zeros(shape) for name, shape in more.items()}, target / WEIGHTS)
    return target


def _unchanged(config: Config) -> None:
    """Leave the config as it is."""


def _nested(config: Config) -> None:
    """Make the config that of a model for images."""
    inner = dict(config)
    config.clear()
    kind = inner["model_type"].removesuffix("_text")
    name = inner["architectures"][0].replace("ForCausalLM", "ForConditionalGeneration")
    vision = {"depth": 1, "hidden_size": 32}
    config |= {"architectures": [name], "model_type": kind, "text_config": inner, "vision_config": vision}


def _flat(config: Config) -> None:
    """Name the class of a model for images, as text models do that were cut out of one."""
    config["architectures"] = [config["architectures"][0].replace("ForCausalLM", "ForConditionalGeneration")]


def _inside(name: str) -> str:
    return name.replace("model.", "model.language_model.", 1)


SKIPPED = {
    "mtp.fc.weight": (64, 128),
    "mtp.layers.0.input_layernorm.weight": (64,),
    "model.visual.merger.norm.weight": (64,),
}
FORMS = {
    "text class, names of the whole": (_unchanged, _inside),
    "whole, names of the text class": (_nested, str),
    "whole class, config of the text": (_flat, _inside),
    "whole": (_nested, _inside),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["qwen3.5", "qwen3.5 moe"])
def test_text_models_of_qwen3_5_are_read_in_each_form(family: Family, tmp_path: Path, name: str, form: str) -> None:
    change, name_of = FORMS[form]
    folder = _copy(family(name), tmp_path / "copy", change, name_of, **SKIPPED)
    np.testing.assert_array_equal(_logits(folder), _logits(family(name)))


def _as_published(config: Config) -> None:
    """Name the fields of Nemotron-H as its first configs do."""
    letters = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
    config["hybrid_override_pattern"] = "".join(letters[kind] for kind in config.pop("layers_block_type"))
    old = {"head_dim": "attention_head_dim", "n_groups": "mamba_n_groups", "conv_kernel": "mamba_d_conv"}
    for name, theirs in (old | {"use_conv_bias": "mamba_conv_bias"}).items():
        config[theirs] = config.pop(name)


def _by_layer_types(config: Config) -> None:
    config["layer_types"] = config.pop("layers_block_type")
    config["num_hidden_layers"] = len(config["layer_types"])


@pytest.mark.parametrize("change", [_as_published, _by_layer_types])
@pytest.mark.parametrize("name", ["nemotron h", "nemotron h moe"])
def test_nemotron_is_read_in_each_form(family: Family, tmp_path: Path, name: str, change: Any) -> None:
    folder = _copy(
        family(name), tmp_path / "copy", change, lambda one: one.replace("backbone.", "model.", 1), **SKIPPED
    )
    np.testing.assert_array_equal(_logits(folder), _logits(family(name)))


def test_granite_names_its_layers_in_either_field(family: Family, tmp_path: Path) -> None:
    def change(config: Config) -> None:
        config["layers_block_type"] = config.pop("layer_types")

    folder = _copy(family("granite hybrid"), tmp_path / "copy", change)
    np.testing.assert_array_equal(_logits(folder), _logits(family("granite hybrid")))


def test_granite_4_without_recurrent_layers_is_computed(tmp_path: Path) -> None:
    """As the 350M and 1B of Granite 4.0 are, beside which those with recurrent layers have an `h` in their names."""
    folder = make_family_model(tmp_path / "model", "granite hybrid", layer_types=["full_attention"] * 3)
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        want = module(torch.tensor([TOKEN_IDS])).logits[0].numpy()
    assert error_of(_logits(folder), want) < 2e-4


@pytest.mark.parametrize(
    ("name", "fields", "named"),
    [
        ("qwen3.5 moe", {"layer_types": ["linear_attention", "rwkv", "full_attention"]}, "layer 1 has 'rwkv'"),
        ("qwen3 next", {"layer_types": ["linear_attention", "full_attention", "conv"]}, r"layer_types\[2\] is 'conv'"),
        ("lfm2", {"layer_types": ["conv", "mamba", "conv", "conv"]}, r"layer_types\[1\] is 'mamba'"),
        ("lfm2 moe", {"layer_types": ["conv", "conv", "linear_attention"]}, r"layer_types\[2\] is 'linear_attention'"),
        ("lfm3", {"layer_types": ["conv"] * 4 + ["moe"]}, r"layer_types\[4\] is 'moe'"),
        ("granite hybrid", {"layer_types": ["mamba", "attention", "conv"]}, r"layer_types\[2\] is 'conv'"),
        ("granite hybrid", {"layer_types": None, "layers_block_type": ["mamba", "xlstm"]}, r"type\[1\] is 'xlstm'"),
        ("nemotron h", {"layers_block_type": ["mamba", "mlp", "lstm", "mamba"]}, r"layers_block_type\[2\] is 'lstm'"),
        ("nemotron h", {"layers_block_type": None, "hybrid_override_pattern": "M-*X"}, r"pattern\[3\] is 'X'"),
        ("nemotron h", {"layers_block_type": None}, "layers_block_type is 'None' but must name the kind of each layer"),
        ("nemotron h", {"mamba_hidden_act": "gelu"}, "mamba_hidden_act is 'gelu', but only 'silu' is supported"),
    ],
    ids=str,
)  # fmt: skip
def test_an_unknown_kind_of_layer_is_named_with_its_index(
    family: Family, tmp_path: Path, name: str, fields: Config, named: str
) -> None:
    folder = _copy(family(name), tmp_path / "copy", lambda config: config.update(fields))
    with pytest.raises(ConfigError, match=named):
        find_model(str(folder), runner_options(), lambda stage, done: None)


GATES = ("in_proj_a.weight", "in_proj_b.weight")
"""What tools that quantize Qwen3.5 leave as it is."""
BY_ROW = ("packed int4", "int8 by row", "fp8 in blocks")


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("qwen3.5", "gptq int4 groups of 32"),
        ("qwen3.5", "awq"),
        *((name, layout) for name in ("qwen3.5", "lfm2", "nemotron h") for layout in BY_ROW),
    ],
)
def test_quantized_projections_of_recurrent_layers_are_read(tmp_path: Path, name: str, layout: str) -> None:
    folder = make_family_model(tmp_path / "plain", name, "bfloat16", intermediate_size=128)
    meant = write_quantized(folder, LAYOUTS[layout], tmp_path / "quantized", GATES)
    # transformers writes Nemotron's tensors under the names of the published files.
    meant = {own.replace("backbone.", "model.", 1): matrix for own, matrix in meant.items()}
    module: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        for own, weight in module.named_parameters():
            if own in meant:
                weight.copy_(meant.pop(own))
        want = module(torch.tensor([TOKEN_IDS])).logits[0].numpy()
    assert not meant
    assert error_of(_logits(tmp_path / "quantized"), want) < 2e-4
