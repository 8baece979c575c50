"""Reading weight files: their tensors and names, and the errors for broken ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quantize
from safetensors.torch import load_file, save_file

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.checkpoint.source import ModelSource
from penstock.gpu_node.model.checkpoint.stored_tensors import Checkpoint

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INTER, VOCAB = 4, 2, 16, 64, 128, 48
FORMATS = {"q4_0": 0.2, "q4_1": 0.2, "q8_0": 0.02, "f16": 1e-3, "bf16": 1e-2, "f32": 1e-7}
"""GGUF's formats, and how far a value of size one may move when it is kept so."""


def _interleave(weight: Any, num_heads: int) -> Any:
    """Reorder queries and keys as llama.cpp's converter does."""
    rows, columns = weight.shape
    return weight.reshape(num_heads, 2, rows // num_heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _write_gguf(path: Path, kind: str = "f32", *, architecture: str = "llama", **metadata: int) -> dict[str, Any]:
    """Write a file of one layer. Return its values under Hugging Face's names."""
    rng = np.random.default_rng(0)
    values = {
        "model.embed_tokens.weight": rng.uniform(-1, 1, (VOCAB, HIDDEN)),
        "model.layers.0.input_layernorm.weight": rng.uniform(-1, 1, HIDDEN),
        "model.layers.0.self_attn.q_proj.weight": rng.uniform(-1, 1, (HEADS * HEAD_DIM, HIDDEN)),
        "model.layers.0.self_attn.k_proj.weight": rng.uniform(-1, 1, (KV_HEADS * HEAD_DIM, HIDDEN)),
        "model.layers.0.mlp.down_proj.weight": rng.uniform(-1, 1, (HIDDEN, INTER)),
        "lm_head.weight": rng.uniform(-1, 1, (VOCAB, HIDDEN)),
    }
    stored = {name: value.astype(np.float32) for name, value in values.items()}
    names = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.layers.0.input_layernorm.weight": "blk.0.attn_norm.weight",
        "model.layers.0.self_attn.q_proj.weight": "blk.0.attn_q.weight",
        "model.layers.0.self_attn.k_proj.weight": "blk.0.attn_k.weight",
        "model.layers.0.mlp.down_proj.weight": "blk.0.ffn_down.weight",
        "lm_head.weight": "output.weight",
    }
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(metadata.get("layers", 1))
    writer.add_token_list(["<s>", "the", "水門"])
    writer.add_head_count(metadata.get("heads", HEADS))
    writer.add_head_count_kv(KV_HEADS)
    writer.add_custom_alignment(64)
    for name, value in stored.items():
        heads = HEADS if "q_proj" in name else KV_HEADS
        laid_out = _interleave(value, heads) if "q_proj" in name or "k_proj" in name else value
        as_stored = GGMLQuantizationType[kind.upper() if value.ndim > 1 else "F32"]
        writer.add_tensor(names[name], quantize(laid_out, as_stored), raw_dtype=as_stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def _open_gguf(path: Path) -> Checkpoint:
    return Checkpoint.open(ModelSource(path.parent, path))


@pytest.mark.parametrize("kind", FORMATS)
def test_gguf_tensors_are_found_under_hugging_faces_names(kind: str, tmp_path: Path) -> None:
    values = _write_gguf(tmp_path / "m.gguf", kind)
    checkpoint = _open_gguf(tmp_path / "m.gguf")
    for name, want in values.items():
        tensor = checkpoint.get(name, *want.shape)
        np.testing.assert_allclose(tensor.to_float32(), want, atol=FORMATS[kind])
        assert tensor.data.shape[0] == (want.shape[0] if want.ndim > 1 else 1)
        assert not tensor.data.flags.owndata and not tensor.data.flags.writeable
    kinds = {checkpoint.get(name, *want.shape).kind for name, want in values.items() if want.ndim > 1}
    assert kinds == {{"f16": "float16", "bf16": "bfloat16", "f32": "float32"}.get(kind, kind)}


def test_row_order_says_where_a_row_is_stored(tmp_path: Path) -> None:
    values = _write_gguf(tmp_path / "m.gguf", "q8_0")
    checkpoint = _open_gguf(tmp_path / "m.gguf")
    q = checkpoint.get("model.layers.0.self_attn.q_proj.weight", HEADS * HEAD_DIM, HIDDEN)
    want = quantize(values["model.layers.0.self_attn.q_proj.weight"], GGMLQuantizationType.Q8_0)
    assert q.row_order is not None
    np.testing.assert_array_equal(q.data[q.row_order], want)
    assert checkpoint.get("model.layers.0.mlp.down_proj.weight", HIDDEN, INTER).row_order is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_safetensors_are_read_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 5).to(dtype), "b": torch.randn(7).to(dtype)}
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(ModelSource(tmp_path))
    for name, want in tensors.items():
        tensor = checkpoint.get(name, *want.shape)
        assert torch.equal(torch.from_numpy(tensor.to_float32()), want.float())
        assert f"torch.{tensor.kind}" == str(dtype) and tensor.row_order is None
        assert not tensor.data.flags.owndata


def test_missing_tensor_or_tensor_of_another_shape_is_named(tiny_model: Path, tmp_path: Path) -> None:
    _write_gguf(tmp_path / "m.gguf")
    for checkpoint in (Checkpoint.open(ModelSource(tiny_model)), _open_gguf(tmp_path / "m.gguf")):
        with pytest.raises(ConfigError, match=r"no tensor model\.layers\.9\.mlp\.up_proj\.weight"):
            checkpoint.get("model.layers.9.mlp.up_proj.weight", INTER, HIDDEN)
        with pytest.raises(ConfigError, match=r"input_layernorm\.weight.* has shape \[64\].*\[65\]"):
            checkpoint.get("model.layers.0.input_layernorm.weight", 65)


def test_a_shard_may_hold_any_tensor(tiny_model: Path, tmp_path: Path) -> None:
    tensors = load_file(tiny_model / "model.safetensors")
    names = sorted(tensors)
    weight_map = {name: f"{i % 2}.safetensors" for i, name in enumerate(names)}
    for shard in ("0.safetensors", "1.safetensors"):
        save_file({name: tensors[name] for name in names if weight_map[name] == shard}, tmp_path / shard)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    checkpoint = Checkpoint.open(ModelSource(tmp_path))
    for name, want in tensors.items():
        assert torch.equal(torch.from_numpy(checkpoint.get(name, *want.shape).to_float32()), want)


@pytest.mark.parametrize("kept", [0.0, 0.001, 0.02, 0.3, 0.7, 0.999])
def test_files_that_are_cut_short_are_refused_by_name(kept: float, tiny_model: Path, tmp_path: Path) -> None:
    _write_gguf(tmp_path / "m.gguf")
    shutil.copy(tiny_model / "model.safetensors", tmp_path / "m.safetensors")
    for path in (tmp_path / "m.gguf", tmp_path / "m.safetensors"):
        content = path.read_bytes()
        path.write_bytes(content[: int(len(content) * kept)])
    with pytest.raises(ConfigError, match=r"m\.gguf.*(cut short|empty)"):
        _open_gguf(tmp_path / "m.gguf")
    with pytest.raises(ConfigError, match=r"m\.safetensors.*(cut short|empty)"):
        Checkpoint.open(ModelSource(tmp_path))


def test_a_gguf_file_of_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    _write_gguf(tmp_path / "m.gguf", architecture="mamba")
    with pytest.raises(ConfigError, match=r"mamba.*llama"):
        _open_gguf(tmp_path / "m.gguf")


def test_more_layers_than_tensors_are_refused_before_anything_is_made_for_each(tmp_path: Path) -> None:
    _write_gguf(tmp_path / "m.gguf", layers=1000)
    with pytest.raises(
        ConfigError, match=r"m\.gguf.*llama\.block_count is 1000, but the file has the tensors of 1 layers"
    ):
        _open_gguf(tmp_path / "m.gguf")


def test_a_tensor_of_many_dimensions_is_refused_before_they_are_read(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    _write_gguf(path)
    content, name = bytearray(path.read_bytes()), b"token_embd.weight"
    content[(at := content.index(name) + len(name)) : at + 4] = (1 << 31).to_bytes(4, "little")
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"m\.gguf.*token_embd\.weight has 2147483648 dimensions; at most 4"):
        _open_gguf(path)


def test_heads_that_do_not_divide_the_rows_are_refused(tmp_path: Path) -> None:
    _write_gguf(tmp_path / "m.gguf", heads=6)
    with pytest.raises(ConfigError, match=r"64 rows.*6 heads"):
        _open_gguf(tmp_path / "m.gguf").get("model.layers.0.self_attn.q_proj.weight", HEADS * HEAD_DIM, HIDDEN)


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"[]",
        b'{"a": 1}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}',
        b'{"a": {"dtype": "F8_E4M3", "shape": [2, 3], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [true, 2], "data_offsets": [0, 8]}}',
        b'{"a": ' + b"[" * 100_000,
    ],
)
def test_safetensors_headers_that_make_no_sense_are_refused(header: bytes, tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(ConfigError, match=r"m\.safetensors"):
        Checkpoint.open(ModelSource(tmp_path))


def test_unsupported_tensor_format_is_named(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(4, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="tensor a is stored as i8"):
        Checkpoint.open(ModelSource(tmp_path)).get("a", 4).to_float32()


@pytest.mark.parametrize("dtype", ["Q8_0", "q4_K", "F4"])
def test_a_format_that_only_gguf_files_have_is_refused_in_safetensors(dtype: str, tmp_path: Path) -> None:
    # Kernels that took it for one would read rows of 34 bytes where there are 2.
    header = json.dumps({"a": {"dtype": dtype, "shape": [4, 32], "data_offsets": [0, 8]}}).encode()
    (tmp_path / "m.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(ConfigError, match=f"tensor a is stored as safetensors {dtype}, which cannot be read"):
        Checkpoint.open(ModelSource(tmp_path)).get("a", 4, 32)


@pytest.mark.model
def test_tensors_of_the_demo_model_equal_those_of_transformers(demo_gguf: Path, demo_model: Path) -> None:
    ours = Checkpoint.open(ModelSource(demo_model, demo_gguf))
    theirs = load_file(demo_model / "model.safetensors")
    assert len(theirs) == 272
    for name, want in theirs.items():
        assert torch.equal(torch.from_numpy(ours.get(name, *want.shape).to_float32()).bfloat16(), want), name
