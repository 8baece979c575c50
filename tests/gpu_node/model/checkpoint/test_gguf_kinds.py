"""Every format of GGUF files has the logits of the values that the package gguf reads, on every runner."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from fakes.runners.runner_options import runner_options
from fixtures.gguf_file import gguf_values, write_gguf
from fixtures.plans import logits_alone
from fixtures.quantized_checkpoint import TOKEN_IDS
from fixtures.random_families import make_family_model
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from penstock.gpu_node.model.checkpoint.gguf_file import GgufFile
from penstock.gpu_node.model.checkpoint.source import ModelSource, OpenModel
from penstock.gpu_node.model.loading import load
from penstock.gpu_node.model.native.runner import NativeRunner

Made: TypeAlias = Callable[..., tuple[ModelSource, NDArray[Any]]]

FORMATS = {
    "q4_1": "int4_group",
    "q8_0": "int8_group",
    **{kind: kind for kind in ("q4_0", "q5_0", "q5_1")},
    **{kind: kind for kind in ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs", "mxfp4")},
    **dict.fromkeys(("f16", "bf16"), "bf16"),
}
"""What the native kernels keep each in."""
SHAPES: dict[str, Any] = {
    "tie_word_embeddings": False,
    "hidden_size": 256,
    "intermediate_size": 256,
    "initializer_range": 0.1,
}
"""Some formats have blocks of 256."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    """A Llama with weights in a GGUF file, and transformers' logits for their values."""
    folder = make_family_model(tmp_path_factory.mktemp("plain"), "llama", "bfloat16", **SHAPES)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    @cache
    def make(kind: str, first_layer: str = "") -> tuple[ModelSource, NDArray[Any]]:
        gguf = write_gguf(folder, tmp_path_factory.mktemp("gguf") / "m.gguf", "llama", kind, first_layer)
        values = gguf_values(folder, gguf, "llama")
        with torch.inference_mode():
            model.load_state_dict({name: torch.from_numpy(value.copy()) for name, value in values.items()})
            return ModelSource(folder, gguf), model(torch.tensor([TOKEN_IDS])).logits[0].numpy()

    return make


@pytest.mark.parametrize(
    ("name", "architecture"), [("llama 3", "llama"), ("llama linear", "llama"), ("qwen2 yarn", "qwen2")]
)
def test_positions_are_scaled_as_the_file_says(
    name: str, architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_family_model(tmp_path / "model", name, "bfloat16")
    with torch.inference_mode():
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        want = model(torch.tensor([2 * TOKEN_IDS])).logits[0].numpy()
    gguf = write_gguf(folder, tmp_path / "m.gguf", architecture)
    # As transformers reads the file.
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": config["rope_parameters"]["rope_theta"]}
    (folder / "config.json").write_text(json.dumps(config))
    runner = _load(ModelSource(folder, gguf), monkeypatch, num_kv_blocks=13).runner
    np.testing.assert_allclose(logits_alone(runner, 2 * TOKEN_IDS), want, rtol=0, atol=1e-4)


def _load(source: ModelSource, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    # What the file says of config and tokenizer is there already.
    opened = OpenModel(source, None if source.gguf is None else GgufFile(source.gguf))
    monkeypatch.setattr(load, "open_model", lambda *_, check: opened)
    return load.load_model("m.gguf", runner_options(max_num_seqs=1, **options), lambda *_: None)


@pytest.mark.parametrize("kind", FORMATS)
def test_logits_equal_those_of_the_models_float_weights(made: Made, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source, want = made(kind)
    torch_runner = _load(source, monkeypatch).runner
    np.testing.assert_allclose(logits_alone(torch_runner, TOKEN_IDS), want, rtol=0, atol=1e-4)
    assert _native_error(source, want, FORMATS[kind], monkeypatch) < 0.06


def test_formats_may_differ_by_layer(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows for Q6_K carry sums of half groups, which no matrix of the last layer needs."""
    assert _native_error(*made("q4_k", first_layer="q6_k"), "q6_k", monkeypatch) < 0.06


def _native_error(source: ModelSource, want: NDArray[Any], name: str, monkeypatch: pytest.MonkeyPatch) -> float:
    """Return the error of the native runner's logits, as a share of their spread. `name`: a format that it keeps."""
    native = _load(source, monkeypatch, runner="native", dtype="bfloat16", num_threads=1)
    assert name in native.arithmetic.split("-")[2].split("+")
    assert isinstance(native.runner, NativeRunner)
    got = logits_alone(native.runner, TOKEN_IDS)
    native.runner.close()
    return float(np.sqrt(np.square(got - want).mean()) / want.std())
