"""When and where the torch runner reads a checkpoint's weights."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes.runners.runner_options import runner_options
from fixtures.gguf_file import write_gguf
from fixtures.plans import logits_alone
from fixtures.quantized_checkpoint import LAYOUTS, write_quantized
from fixtures.random_families import make_family_model
from fixtures.random_llama import make_llama
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.checkpoint.source import ModelSource
from penstock.gpu_node.model.checkpoint.stored_kinds import StoredTensor
from penstock.gpu_node.model.checkpoint.stored_tensors import Checkpoint
from penstock.gpu_node.model.loading.load import load_model
from penstock.gpu_node.model.torch_common.tensors import Converter
from penstock.gpu_node.model.torch_cpu.load import can_prepack

TOKENS = [5, 7, 11]


def _runner(folder: Path, dtype: str = "float32") -> Any:
    return load_model(str(folder), runner_options(dtype=dtype), lambda _stage, _fraction: None).runner


def _rows_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the tensors that are converted from now on, in order."""
    read: list[str] = []
    tensor = Converter.tensor

    def watched(self: Converter, stored: Any) -> torch.Tensor:
        read.append(stored.name)
        return tensor(self, stored)

    monkeypatch.setattr(Converter, "tensor", watched)
    return read


def test_a_layer_is_read_when_a_step_first_comes_to_it_and_once(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = _rows_read(tiny_model, monkeypatch)
    runner = _runner(tiny_model)
    assert not [name for name in read if ".layers." in name]
    want = logits_alone(runner, TOKENS)
    layers = [int(name.split(".")[2]) for name in read if ".layers." in name]
    assert set(layers) == {0, 1} and layers == sorted(layers)
    read.clear()
    np.testing.assert_array_equal(logits_alone(runner, TOKENS), want)
    assert read == ["model.embed_tokens.weight"]


def test_a_layer_that_could_not_be_read_is_read_by_the_next_step(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = logits_alone(_runner(tiny_model), TOKENS)
    runner, tensor = _runner(tiny_model), Converter.tensor

    def fails(self: Converter, stored: Any) -> torch.Tensor:
        if "layers.1" in stored.name:
            raise MemoryError
        return tensor(self, stored)

    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr(Converter, "tensor", fails)
        logits_alone(runner, TOKENS)
    np.testing.assert_array_equal(logits_alone(runner, TOKENS), want)


def test_tensor_that_the_first_step_could_not_read_is_refused_at_the_start(model_copy: Path) -> None:
    tensors = load_file(model_copy / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    save_file(tensors | {name: tensors[name].to(torch.int8)}, model_copy / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"{name} is stored as i8"):
        _runner(model_copy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_only_tensors_stored_in_another_dtype_or_order_are_copied(dtype: torch.dtype, tmp_path: Path) -> None:
    values = torch.randn(6, 8)
    save_file({"a": values.to(dtype)}, tmp_path / "model.safetensors")
    stored = Checkpoint.open(ModelSource(tmp_path)).get("a", 6, 8)
    assert isinstance(stored, StoredTensor)
    shuffled = stored.take_rows(np.array([4, 0, 5], np.int32), 3, 8)
    for wanted in (torch.float32, torch.float16, torch.bfloat16):
        convert = Converter(wanted)
        got = convert.tensor(stored)
        assert torch.equal(got, values.to(dtype).to(wanted))
        assert (got.data_ptr() == stored.data.ctypes.data) == convert.is_mapped(stored) == (wanted is dtype)
        assert torch.equal(convert.tensor(shuffled), got[[4, 0, 5]]) and not convert.is_mapped(shuffled)
        assert torch.equal(convert((stored, shuffled)), torch.cat((got, got[[4, 0, 5]])))


def test_tensors_at_odd_addresses_are_read(tmp_path: Path) -> None:
    header = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}} '
    assert len(header) % 4
    values = np.array([1.5, -2.0], np.float32)
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + values.tobytes())
    got = Converter(torch.float32).tensor(Checkpoint.open(ModelSource(tmp_path)).get("a", 2))
    assert got.tolist() == values.tolist() and got.data_ptr() % 4 == 0


@pytest.mark.parametrize("family", ["llama", "qwen2", "falcon 40b", "gpt-neox"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_logits_are_the_same_wherever_the_weights_lie(
    family: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the file, part by part, against one copy of all parts."""
    folder = make_family_model(tmp_path / "model", family, dtype)
    got = logits_alone(_runner(folder, dtype), TOKENS)
    monkeypatch.setattr(Converter, "is_mapped", lambda self, stored: False)
    want = logits_alone(_runner(folder, dtype), TOKENS)
    if can_prepack(getattr(torch, dtype)):
        np.testing.assert_array_equal(got, want)
    np.testing.assert_allclose(got, want, rtol=0, atol=2 * torch.finfo(getattr(torch, dtype)).eps * np.abs(want).max())


@pytest.mark.parametrize("kind", ["q4_1", "q8_0", "f16"])
def test_embeddings_are_dequantized_row_by_row(kind: str, tmp_path: Path) -> None:
    folder = make_family_model(tmp_path / "model", "llama")
    gguf = write_gguf(folder, tmp_path / "m.gguf", "llama", kind)
    table = Checkpoint.open(ModelSource(folder, gguf)).get("model.embed_tokens.weight", 384, 64)
    whole = Converter(torch.float32).tensor(table)
    ids = torch.tensor([383, 0, 7, 7], dtype=torch.int32)
    rows = table.take_rows(ids.numpy(), 4, 64)
    assert torch.equal(Converter(torch.float32).tensor(rows), whole[ids])


def test_a_checkpoint_may_be_removed_while_it_is_used(tmp_path: Path) -> None:
    folder = make_llama(tmp_path / "model")
    want = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(torch.tensor([TOKENS])).logits[0]
    runner = _runner(folder)
    shutil.rmtree(folder)
    np.testing.assert_allclose(logits_alone(runner, TOKENS), want.detach().numpy(), atol=1e-4)


def test_quantized_layers_are_read_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To find their tensors is to read them."""
    folder = make_family_model(tmp_path / "plain", "llama", "bfloat16", intermediate_size=128)
    write_quantized(folder, LAYOUTS["packed int8"], tmp_path / "model")
    runner = _runner(tmp_path / "model")
    read = _rows_read(folder, monkeypatch)
    logits_alone(runner, TOKENS)
    assert read == ["model.embed_tokens.weight"]
