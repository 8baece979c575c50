"""GGUF files of models with recurrent layers: the logits of the folder, in all forms of value heads and formats."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes.runners.runner_options import runner_options
from fakes.transformers_logits import error_of
from fixtures.gguf_file import write_gguf
from fixtures.plans import Track, logits_alone, logits_of_step
from fixtures.random_adapters import make_adapter
from fixtures.random_families import make_family_model
from gguf import GGUFReader, GGUFValueType, GGUFWriter
from transformers import AutoModelForCausalLM

from penstock.contract.adapters import AdapterRef
from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.checkpoint.source import open_model
from penstock.gpu_node.model.loading.load import load_model

EXACT_FACTORS = {
    "embedding_multiplier": 2.0,
    "lm_head_multiplier": 0.5,
    "mlp_multipliers": [0.5, 0.25],
    "key_multiplier": 0.5,
    "attention_in_multiplier": 2.0,
    "attention_out_multiplier": 0.25,
    "ssm_in_multiplier": 2.0,
    "ssm_out_multiplier": 0.25,
    "ssm_multipliers": [0.25, 0.5, 1.0, 2.0, 0.5],
}
"""With others, the converter rounds the products of weights and factors."""
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3.5": ("qwen35", {"head_dim": 64}),
    "qwen3.5 moe": ("qwen35moe", {}),
    "lfm2": ("lfm2", {"block_auto_adjust_ff_dim": False}),
    "lfm2 moe": ("lfm2moe", {}),
    "nemotron h moe": ("nemotron_h_moe", {}),
    # A mixture in each layer: llama.cpp's Qwen3-Next has no other.
    "qwen3 next": ("qwen3next", {"mlp_only_layers": []}),
    "granite hybrid": ("granitehybrid", {}),
    "granite hybrid moe": ("granitehybrid", {}),
    "falcon h1": ("falcon-h1", EXACT_FACTORS),
    "falcon h1 with norms": ("falcon-h1", EXACT_FACTORS),
}
"""By family: the architecture that its GGUF files name, and settings of the folder."""
TOKEN_IDS = [(7919 * i) % 384 for i in range(1, 81)]
QUANTIZED = {"q8_0": "int8_group", "q4_k": "q4_k"}
"""Formats of a file, and what the native kernels keep each in."""
MAX_ERROR = 0.06


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Path]]:
    """A family's folder, and a GGUF file of it."""

    @cache
    def make(name: str, kind: str = "bf16") -> tuple[Path, Path]:
        architecture, changes = ARCHITECTURES[name]
        # Formats have blocks of 256.
        sizes = {} if kind == "bf16" else {"hidden_size": 256, "intermediate_size": 256}
        folder = make_family_model(tmp_path_factory.mktemp("folder"), name, "bfloat16", **changes | sizes)
        return folder, write_gguf(folder, tmp_path_factory.mktemp("gguf") / "m.gguf", architecture, kind)

    return make


def _runner(model: Path, runner: str = "torch", **options: Any) -> Any:
    dtype = "bfloat16" if runner == "native" else "float32"
    chosen = {"runner": runner, "dtype": dtype, "num_kv_blocks": 32, "state_slots": 4, "max_num_seqs": 2} | options
    return load_model(str(model), runner_options(**chosen), lambda stage, done: None)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_file_has_the_logits_of_its_folder(made: Callable[..., tuple[Path, Path]], name: str) -> None:
    folder, gguf = made(name)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        want = model(torch.tensor([TOKEN_IDS])).logits[0].numpy()
    assert error_of(logits_alone(_runner(gguf).runner, TOKEN_IDS), want) < 2e-4


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("name", ["qwen3.5", "lfm2"])
def test_the_kernels_keep_a_files_formats(made: Callable[..., tuple[Path, Path]], name: str, kind: str) -> None:
    _, gguf = made(name, kind)
    want = logits_alone(_runner(gguf).runner, TOKEN_IDS)
    native = _runner(gguf, "native", num_threads=1)
    assert QUANTIZED[kind] in native.arithmetic.split("-")[2].split("+")
    got = logits_alone(native.runner, TOKEN_IDS)
    parts = Track(TOKEN_IDS, range(1, 8), state=2)
    steps = [logits_of_step(native.runner, [(parts, count)])[0] for count in (33, 1, 46)]
    native.runner.close()
    assert error_of(got, want) < MAX_ERROR
    np.testing.assert_array_equal(np.concatenate(steps), got)


ADAPTED = {
    "qwen3.5": ("qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj", "k_proj", "down_proj"),
    "qwen3 next": ("qkvz", "in_proj_ba", "out_proj", "k_proj"),
    "granite hybrid": ("q_proj", "k_proj", "in_proj", "out_proj", "input_linear", "output_linear"),
}


@pytest.mark.parametrize("name", ADAPTED)
def test_an_adapter_of_the_folder_fits_the_file(
    made: Callable[..., tuple[Path, Path]], tmp_path: Path, name: str
) -> None:
    """Its rows and columns are in the folder's order, and its tensors may hold what the file splits."""
    folder, gguf = made(name)
    base, parts = AutoModelForCausalLM.from_pretrained(folder), ADAPTED[name]
    adapter = make_adapter(tmp_path / "adapter", base, rank=4, seed=1, only=parts)
    adapted = []
    for model in (folder, gguf):
        loaded = _runner(model, lora={"adapter": adapter}, max_loras=1)
        plain = logits_alone(loaded.runner, TOKEN_IDS)
        loaded.runner.set_adapter(0, loaded.adapters.find(AdapterRef(name="adapter")))
        track = Track(TOKEN_IDS, range(1, 8), state=0, adapter=0)
        adapted += logits_of_step(loaded.runner, [(track, len(TOKEN_IDS))])
        assert error_of(adapted[-1], plain) > 0.01
    assert error_of(adapted[1], adapted[0]) < 2e-4


def test_adapters_are_refused_where_the_file_lacks_the_factors(
    made: Callable[..., tuple[Path, Path]], tmp_path: Path
) -> None:
    folder, gguf = made("falcon h1")
    adapter = make_adapter(tmp_path / "adapter", AutoModelForCausalLM.from_pretrained(folder))
    with pytest.raises(ConfigError, match="adapters do not fit this file: the converter multiplies factors into"):
        _runner(gguf, lora={"adapter": adapter}, max_loras=1)


@pytest.mark.parametrize(
    ("removed", "added", "named"),
    [
        ("ssm.inner_size", {}, r"qwen35\.ssm\.inner_size of the metadata is None but must be a number"),
        (
            "attention.recurrent_layers",
            {"attention.recurrent_layers": [1]},
            "has 1 values but must have .* of 4 layers",
        ),
        (
            "",
            {"nextn_predict_layers": 1},
            r"qwen35\.nextn_predict_layers says that layer 3 predicts further tokens, but",
        ),
        ("", {"nextn_predict_layers": 4}, r"qwen35\.block_count of the metadata leaves 0 layers"),
        ("ssm.state_size", {"ssm.state_size": 0}, r"qwen35\.ssm\.state_size is 0 but must be"),
    ],
    ids=str,
)
def test_wrong_metadata_is_refused_by_its_key(
    made: Callable[..., tuple[Path, Path]], tmp_path: Path, removed: str, added: dict[str, Any], named: str
) -> None:
    wrong = tmp_path / "wrong.gguf"
    _rewrite(made("qwen3.5")[1], wrong, f"qwen35.{removed}", {f"qwen35.{key}": value for key, value in added.items()})
    with pytest.raises(ConfigError, match=named):
        open_model(str(wrong), lambda stage, done: None)


Tensors = dict[str, tuple[Any, Any]]
"""The numbers of tensors and their formats, by name."""


def _from_ollama(tensors: Tensors) -> None:
    """Name a bias as Ollama's converter does, and add what it keeps of a model for images that predicts tokens."""
    for name in [name for name in tensors if name.endswith("ssm_dt.bias")]:
        tensors[name.removesuffix(".bias")] = tensors.pop(name)
    tensors |= dict.fromkeys(("v.blk.0.attn_q.weight", "mtp.fc.weight"), tensors["output_norm.weight"])


def _joined_experts(tensors: Tensors) -> None:
    """Join gates and up projections, as the converter does with --fuse-gate-up-exps."""
    for name in [name for name in tensors if "ffn_gate_exps" in name]:
        (gate, kind), (up, _) = tensors.pop(name), tensors.pop(name.replace("gate", "up"))
        tensors[name.replace("gate", "gate_up")] = np.concatenate((gate, up), axis=1), kind


def _joined_heads(tensors: Tensors) -> None:
    """Join queries, keys and values, as the converter does with --fuse-qkv."""
    for name in [name for name in tensors if "attn_q." in name]:
        parts = [tensors.pop(name.replace("attn_q.", f"attn_{part}.")) for part in "qkv"]
        tensors[name.replace("attn_q.", "attn_qkv.")] = np.concatenate([rows for rows, _ in parts]), parts[0][1]


def _joined_inputs(tensors: Tensors) -> None:
    """Join the inputs of delta rules by key head, as the first files of Qwen3-Next have them."""
    for name in [name for name in tensors if "attn_gate." in name]:
        (gates, kind), (inputs, _) = tensors.pop(name), tensors.pop(name.replace("attn_gate", "attn_qkv"))
        # Two key heads of 32 channels.
        parts = [part.reshape(2, -1, part.shape[-1]) for part in (*np.split(inputs, (64, 128)), gates)]
        tensors[name.replace("attn_gate", "ssm_in")] = (
            np.concatenate(parts, axis=1).reshape(-1, inputs.shape[-1]),
            kind,
        )


def _with_predicting_layer(tensors: Tensors) -> None:
    """Add a layer that predicts further tokens, as the converter does without --no-mtp."""
    for part in ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output"):
        tensors[f"blk.4.{part}.weight"] = tensors[f"blk.2.{part}.weight"]
    tensors["blk.4.nextn.eh_proj.weight"] = tensors["blk.2.attn_output.weight"]


def _as_it_is(tensors: Tensors) -> None:
    """Leave the tensors as they are."""


def _with_other_norm(tensors: Tensors) -> None:
    tensors["output_norm.weight"] = tensors.pop("token_embd_norm.weight")


@pytest.mark.parametrize(
    ("name", "change", "added"),
    [
        ("qwen3.5", _from_ollama, {"attention.head_count_kv": [0, 0, 2, 0], "rope.dimension_sections": [11, 11, 10]}),
        ("qwen3.5", _with_predicting_layer, {"block_count": 5, "nextn_predict_layers": 1}),
        ("qwen3.5", _as_it_is, {"block_count": 5, "nextn_predict_layers": 1}),
        ("lfm2", _with_other_norm, {"feed_forward_length": 144}),
        ("qwen3.5 moe", _joined_experts, {}),
        ("granite hybrid moe", _joined_experts, {}),
        ("lfm2 moe", _joined_experts, {}),
        ("qwen3.5", _joined_heads, {}),
        ("lfm2", _joined_heads, {}),
        ("granite hybrid", _joined_heads, {}),
        ("nemotron h moe", _joined_heads, {}),
        ("falcon h1", _joined_heads, {}),
        ("qwen3 next", _joined_heads, {}),
        ("qwen3 next", _joined_inputs, {}),
    ],
)
def test_files_of_other_converters_have_the_same_logits(
    made: Callable[..., tuple[Path, Path]], tmp_path: Path, name: str, change: Callable[[Tensors], None], added: Any
) -> None:
    source, path = made(name)[1], tmp_path / "other.gguf"
    _rewrite(source, path, "", {f"{ARCHITECTURES[name][0]}.{key}": value for key, value in added.items()}, change)
    np.testing.assert_array_equal(
        logits_alone(_runner(path).runner, TOKEN_IDS), logits_alone(_runner(source).runner, TOKEN_IDS)
    )


@pytest.mark.parametrize("is_missing", [True, False], ids=["missing", "misshapen"])
@pytest.mark.parametrize(
    ("name", "tensor", "named"),
    [
        ("qwen3.5", "ssm_conv1d.weight", r"model\.layers\.0\.linear_attn\.conv1d\.weight"),
        ("qwen3.5", "ssm_a", r"model\.layers\.0\.linear_attn\.A_log"),
        ("qwen3.5", "ssm_dt.bias", r"model\.layers\.0\.linear_attn\.dt_bias"),
        ("qwen3.5", "ssm_norm.weight", r"model\.layers\.0\.linear_attn\.norm\.weight"),
        ("qwen3.5", "ssm_alpha.weight", r"model\.layers\.0\.linear_attn\.in_proj_a\.weight"),
        ("qwen3 next", "ssm_ba.weight", r"model\.layers\.0\.linear_attn\.in_proj_ba\.weight"),
        ("lfm2", "shortconv.conv.weight", r"model\.layers\.0\.conv\.conv\.weight"),
        ("granite hybrid", "ssm_d", r"model\.layers\.0\.mamba\.D"),
        ("nemotron h moe", "ssm_norm.weight", r"model\.layers\.0\.mixer\.norm\.weight"),
        ("falcon h1", "ssm_a", r"model\.layers\.0\.mamba\.A_log"),
    ],
)
def test_a_small_tensor_that_is_missing_or_misshapen_is_named(
    made: Callable[..., tuple[Path, Path]], tmp_path: Path, name: str, tensor: str, named: str, is_missing: bool
) -> None:
    stored = f"blk.0.{tensor}"

    def change(tensors: Tensors) -> None:
        numbers, kind = tensors.pop(stored)
        if not is_missing:
            tensors[stored] = numbers[:-1], kind

    _rewrite(made(name)[1], tmp_path / "wrong.gguf", "", {}, change)
    shown = rf"tensor {named} \({re.escape(stored)}\)"
    refused = f"the checkpoint has no {shown}" if is_missing else rf"{shown} has shape \[.*\], the config says \[.*\]"
    with pytest.raises(ConfigError, match=refused):
        _runner(tmp_path / "wrong.gguf", "native")


@pytest.mark.parametrize(
    ("name", "key", "value", "named"),
    [
        ("lfm2", "attention.causal", False, "is false, but tokens of LFM2 see only earlier ones"),
        ("lfm2", "attention.sliding_window", 32, "is 32, but LFM2 with windows is not supported"),
        ("granite hybrid", "rope.dimension_count", 8, "is 8 but must be 16, the channels of a head: of Bamba only"),
    ],
)
def test_what_other_models_of_an_architecture_have_is_refused(
    made: Callable[..., tuple[Path, Path]], tmp_path: Path, name: str, key: str, value: Any, named: str
) -> None:
    """A file would otherwise be computed as if it did not say so."""
    key = f"{ARCHITECTURES[name][0]}.{key}"
    _rewrite(made(name)[1], tmp_path / "other.gguf", "", {key: value})
    with pytest.raises(ConfigError, match=f"{re.escape(key)} {named}"):
        open_model(str(tmp_path / "other.gguf"), lambda stage, done: None)


def _rewrite(
    source: Path, target: Path, removed: str, added: dict[str, Any], change: Callable[[Tensors], None] | None = None
) -> None:
    """Write a file again, with other settings, and with tensors that `change` has changed."""
    reader = GGUFReader(source)
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", removed, *added):
            is_list = field.types[0] == GGUFValueType.ARRAY
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=field.types[-1] if is_list else None)
    for name, value in added.items():
        add: Any = {list: writer.add_array, bool: writer.add_bool}.get(type(value), writer.add_uint32)
        add(name, value)
    tensors: Tensors = {tensor.name: (tensor.data, tensor.tensor_type) for tensor in reader.tensors}
    if change is not None:
        change(tensors)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
