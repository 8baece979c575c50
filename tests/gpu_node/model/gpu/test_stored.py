"""Matrices that GPU kernels multiply in the format of their checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes.runners.runner_options import runner_options
from fixtures.gguf_file import write_gguf
from fixtures.plans import logits_alone
from fixtures.quantized_checkpoint import LAYOUTS, TOKEN_IDS
from fixtures.random_families import make_family_model
from numpy.typing import NDArray
from torch import Tensor

from penstock.gpu_node.model.architecture.families import family_of
from penstock.gpu_node.model.checkpoint.methods import reader_of
from penstock.gpu_node.model.checkpoint.source import ModelSource
from penstock.gpu_node.model.checkpoint.stored_kinds import Stored
from penstock.gpu_node.model.checkpoint.stored_tensors import Checkpoint
from penstock.gpu_node.model.checkpoint.tensors import DecoderTensors
from penstock.gpu_node.model.gpu.device import Device
from penstock.gpu_node.model.gpu.weights import StoredLinearLoader
from penstock.gpu_node.model.loading.load import load_model

AS_STORED = {
    "gptq int4 groups of 32": "int4",
    "gptq int4 symmetric": "int4",
    "gptq int4 v2 by row": "int4",
    "awq": "int4",
    "packed int4": "int4",
    "packed int4 with zeros": "int4",
    "packed int8": "int8",
    "int8 by row": "int8",
    "float8 by row": "fp8",
    "float8 by matrix": "fp8",
    "fp8 by matrix": "fp8",
    "fp8 of modelopt": "fp8",
}
"""The others are dequantized."""
MOST = {"int4": 1e-3, "int8": 0.01, "fp8": 0.04, "none": 1e-6}
"""What rounding activations, or minima to float16, makes of a product's spread."""


def _check(source: ModelSource, kept: str) -> None:
    """Assert that products with a matrix in a storage format equal those with its values."""
    config = json.loads((source.folder / "config.json").read_text())
    checkpoint = Checkpoint.open(source, reader_of(config))
    matrix = DecoderTensors(checkpoint, family_of(config).spec_of(config)).qkv(0)
    device = Device(torch.device("cuda" if torch.cuda.is_available() else "cpu"))

    def convert(parts: tuple[Stored, ...]) -> Tensor:
        return torch.cat([torch.from_numpy(part.to_float32()) for part in parts]).to(device.torch)

    keeper, x = StoredLinearLoader("auto", device), torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    got = keeper(matrix, convert)(x.to(device.torch)).cpu()
    want = StoredLinearLoader("none", device)(matrix, convert)(x.to(device.torch)).cpu()
    assert keeper.formats == {kept}
    assert (got - want).square().mean().sqrt() <= MOST[kept] * want.std()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_products_equal_those_of_the_dequantized_weights(
    quantized: Callable[[str, str], tuple[Path, NDArray[Any]]], layout: str
) -> None:
    _check(ModelSource(quantized("llama", layout)[0]), AS_STORED.get(layout, "none"))


@pytest.mark.parametrize(("kind", "kept"), [("q4_0", "int4"), ("q4_1", "int4"), ("q8_0", "none")])
def test_a_gguf_files_four_bits_are_kept(kind: str, kept: str, tmp_path: Path) -> None:
    folder = make_family_model(tmp_path / "model", "llama 3")
    _check(ModelSource(folder, write_gguf(folder, tmp_path / "m.gguf", "llama", kind)), kept)


def test_a_quantized_checkpoint_runs_as_it_is_stored(
    quantized: Callable[[str, str], tuple[Path, NDArray[Any]]],
) -> None:
    folder, want = quantized("llama", "gptq int4 symmetric")
    options = runner_options(runner="gpu", num_kv_blocks=2, max_model_len=32, max_num_seqs=1)
    loaded: Any = load_model(str(folder), options, lambda *_: None)
    assert loaded.arithmetic == "gpu-float32-int4-kv-float32"
    np.testing.assert_allclose(logits_alone(loaded.runner, TOKEN_IDS[:9]), want[:9], rtol=0, atol=1e-4)
