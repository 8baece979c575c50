"""Families that a runner does not support: refused by name, or computed by another runner with a warning."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from fakes.runners.runner_options import runner_options
from fixtures.random_families import make_family_model

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.loading import load
from penstock.gpu_node.model.loading.load import load_model

Folder = Callable[[str], Path]
FEATURES = {"gemma4 small": ("Gemma4ForCausalLM", "layers that read the keys of others")}


CPU_INSTEAD = {"gemma4 small": "Gemma4ForCausalLM", "mixtral": "experts", "qwen3.5": "recurrent layers"}
"""Families that the CPU computes on a machine with a GPU, and what the log says of them."""


@pytest.mark.parametrize("name", FEATURES)
def test_a_gpu_refuses_a_family_and_names_its_features(family_folder: Folder, name: str) -> None:
    architecture, features = FEATURES[name]
    options = runner_options(runner="gpu", num_kv_blocks=8)
    with pytest.raises(ConfigError, match=f"runner gpu: {architecture} is not supported on a GPU.*{features}"):
        load_model(str(family_folder(name)), options, lambda stage, fraction: None)


@pytest.mark.parametrize("name", CPU_INSTEAD)
def test_the_cpu_computes_a_family_that_a_gpu_does_not_support(
    family_folder: Folder, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(load, "_has_gpu", lambda: True)
    options = runner_options(runner="auto", dtype="float32", num_kv_blocks=8, state_slots=4)
    with caplog.at_level(logging.WARNING):
        loaded = load_model(str(family_folder(name)), options, lambda stage, fraction: None)
    assert loaded.arithmetic == "torch-float32"
    (said,) = [vars(record) for record in caplog.records if record.getMessage() == "the CPU computes, not the GPU"]
    assert CPU_INSTEAD[name] in said["reason"]


def test_experts_that_do_not_fill_the_kernels_panels_are_named(tmp_path: Path) -> None:
    folder = make_family_model(tmp_path, "mixtral", "bfloat16", intermediate_size=40)
    options = runner_options(runner="native", dtype="bfloat16", num_kv_blocks=8)
    with pytest.raises(ConfigError, match="runner native: experts with hidden size 64 and intermediate size 40"):
        load_model(str(folder), options, lambda stage, fraction: None)


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("gemma2", {"layer_types": ["full_attention"]}, "layer_types is .* for each layer; num_hidden_layers is 4"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok is 5 but must be from 1 to 4"),
    ],
)
def test_settings_that_no_runner_supports_are_named(
    family_folder: Folder, model_config: Callable[..., Path], name: str, changes: dict[str, object], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_model(
            str(model_config(family_folder(name), **changes)),
            runner_options(num_kv_blocks=8, load_format="dummy"),
            lambda stage, fraction: None,
        )


@pytest.fixture
def model_config(tmp_path: Path) -> Callable[..., Path]:
    """Write a folder with the changed config of another one, without weights."""

    def write(folder: Path, **changes: object) -> Path:
        config = json.loads((folder / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        return tmp_path

    return write
