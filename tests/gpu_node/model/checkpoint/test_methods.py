"""Quantized checkpoints have the logits of their dequantized values, in every layout."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes.runners.runner_options import runner_options
from fixtures.plans import logits_alone
from fixtures.quantized_checkpoint import LAYOUTS, TOKEN_IDS
from fixtures.random_families import make_family_model
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.checkpoint.block_repacking import block_kind, in_blocks
from penstock.gpu_node.model.checkpoint.scaled_matrix import ScaledTensor
from penstock.gpu_node.model.loading.load import load_model
from penstock.gpu_node.model.protocol import LoadedModel

Quantized = Callable[[str, str], tuple[Path, NDArray[Any]]]
OPTIONS = runner_options(max_num_seqs=1)


def _load(folder: Path) -> LoadedModel:
    return load_model(str(folder), OPTIONS, lambda stage, fraction: None)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["llama", "gpt-neox"])
def test_logits_equal_those_of_the_dequantized_weights(quantized: Quantized, family: str, layout: str) -> None:
    folder, want = quantized(family, layout)
    runner: Any = _load(folder).runner
    np.testing.assert_allclose(logits_alone(runner, TOKEN_IDS), want, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "group", "has_zeros", "stored"),
    [
        ("int4", 32, False, "q4_0"),
        ("int4", 64, True, "q4_1"),
        ("int4", 192, True, "q4_1"),
        ("int4", 1 << 40, True, "q4_1"),
        ("int4", 48, True, "int4"),
        ("int4", 1, False, "int4"),
        ("int8", 192, False, "q8_0"),
        ("int8", 64, True, "int8"),
        ("fp8", 192, False, "fp8"),
    ],
)
def test_blocks_hold_the_same_numbers(kind: Any, group: int, has_zeros: bool, stored: str) -> None:
    rng, shape = np.random.default_rng(0), (5, -(-192 // group))
    scales = rng.uniform(0.01, 0.1, shape).astype(np.float16).astype(np.float32)
    zeros = rng.integers(-8, 8, shape).astype(np.float32) if has_zeros else None
    least = -8 if kind == "int4" else -128
    numbers = rng.integers(least, -least, (5, 192)).astype(np.int8)
    if kind == "fp8":
        numbers = (numbers & np.int8(-2)).view(np.uint8)  # no NaN
    tensor = ScaledTensor("a", kind, numbers, scales, zeros, group)
    assert block_kind(tensor) == stored
    # What is added to each number of a block is rounded to float16.
    most = 2e-3 if stored == "q4_1" else 0
    np.testing.assert_allclose(in_blocks(tensor).to_float32(), tensor.to_float32(), rtol=0, atol=most)


def _change_settings(folder: Path, target: Path, **changes: Any) -> None:
    shutil.copytree(folder, target, dirs_exist_ok=True)
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"] |= changes
    (target / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("layout", "changes", "reason"),
    [
        ("awq", {"quant_method": "bitsandbytes"}, "bitsandbytes .* supported: awq, compressed-tensors, fp8, gptq"),
        ("awq", {"quant_method": None}, "quant_method None"),
        ("awq", {"bits": 3}, "awq of 3 bits .* supported: 4"),
        ("awq", {"version": "gemv"}, "AWQ format 'gemv' .* supported: gemm"),
        ("gptq int8", {"bits": 3}, "gptq of 3 bits .* supported: 4, 8"),
        ("gptq int8", {"checkpoint_format": "marlin"}, "GPTQ format 'marlin' .* supported: gptq, gptq_v2"),
        ("gptq int8", {"dynamic": {"-:.*gate.*": {}}}, "dynamic"),
        ("gptq int8", {"group_size": None}, "has no 'group_size'"),
        ("gptq int8", {"bits": [4]}, r"bits is \[4\] but must be a whole number"),
        ("awq", {"version": 3}, "version is 3 but must be a text"),
        ("packed int4", {"config_groups": ["x"]}, "config_groups is .* but must be an object"),
        ("awq", {"group_size": 32}, r"q_proj.* has scales \[64, 1\] of 32 columns each"),
        ("fp8 in blocks", {"weight_block_size": 48}, "weight_block_size is 48 but must be two whole numbers"),
        ("fp8 in blocks", {"weight_block_size": [48, 0]}, "weight_block_size is 0 but must be a whole number from 1"),
        ("packed int4", {"format": None}, "has no 'format'"),
        (
            "packed int4",
            {"format": "mxfp4-pack-quantized"},
            "format 'mxfp4-pack-quantized' .* supported: float-quantized",
        ),
        ("nvfp4 of modelopt", {"quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ' .* supported: NVFP4, FP8"),
        ("nvfp4 of modelopt", {"group_size": 32}, "NVFP4 with group_size 32 .* supported: 16"),
        ("packed int4", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
        ("packed int4", {"transform_config": {"config_groups": {}}}, "transform_config"),
    ],
)
def test_unsupported_quantization_is_refused_by_name(
    quantized: Quantized, layout: str, changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    _change_settings(quantized("llama", layout)[0], tmp_path, **changes)
    with pytest.raises(ConfigError, match=reason):
        _load(tmp_path)


def test_modelopt_may_state_its_quantization_in_a_file_of_its_own(quantized: Quantized, tmp_path: Path) -> None:
    folder, want = quantized("llama", "nvfp4 of modelopt")
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    said = {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": ["lm_head"]}
    path = tmp_path / "hf_quant_config.json"
    path.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": said}))
    loaded = _load(tmp_path)
    runner: Any = loaded.runner
    np.testing.assert_allclose(logits_alone(runner, TOKEN_IDS), want, rtol=0, atol=1e-4)
    path.write_text(json.dumps({"quantization": said | {"quant_algo": "W4A16_AWQ"}}))
    with pytest.raises(ConfigError, match="quant_algo 'W4A16_AWQ'"):
        _load(tmp_path)


def test_experts_beside_an_mlp_may_be_quantized_one_by_one(tmp_path: Path) -> None:
    """As ModelOpt writes Gemma 4 26B-A4B, whose floats are in tensors of all experts."""
    plain, target, layout = tmp_path / "plain", tmp_path / "target", LAYOUTS["nvfp4 of modelopt"]
    shutil.copytree(make_family_model(plain, "gemma4 moe", "bfloat16", moe_intermediate_size=64), target)
    model, kept = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32), {}
    values = dict(model.named_parameters())

    def quantize(name: str, matrix: torch.Tensor) -> None:
        packed, meant = layout.pack(matrix.detach(), layout.given)
        kept.update({f"{name}.{part}": one.contiguous() for part, one in packed.items()})
        matrix.copy_(meant)

    with torch.inference_mode():
        for name, stored in load_file(plain / "model.safetensors").items():
            prefix, is_stack, part = name.partition(".experts.")
            for expert, matrix in enumerate(values[name] if is_stack else ()):
                names = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
                for own, rows in zip(names, matrix.chunk(len(names)), strict=True):
                    quantize(f"{prefix}.experts.{expert}.{own}", rows)
            if not is_stack and name.endswith(("self_attn.q_proj.weight", "mlp.gate_proj.weight")):
                quantize(name.removesuffix(".weight"), values[name])
            elif not is_stack:
                kept[name] = stored
        want = model(torch.tensor([TOKEN_IDS])).logits[0].numpy()
    save_file(kept, target / "model.safetensors")
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": layout.settings}))
    runner: Any = _load(target).runner
    np.testing.assert_allclose(logits_alone(runner, TOKEN_IDS), want, rtol=0, atol=1e-4)


_OUT = "model.layers.1.self_attn.o_proj."


@pytest.mark.parametrize(
    ("layout", "part", "change"),
    [
        ("awq", "scales", None),
        ("awq", "scales", lambda scales: scales[:, :-8]),
        ("awq", "qweight", lambda words: words[:, :-1]),
        ("gptq int8", "qzeros", lambda words: words.float()),
        ("gptq int4 any order", "g_idx", lambda groups: groups + 1),
        ("gptq int4 any order", "g_idx", lambda groups: groups[:-1]),
        ("gptq int4 any order", "g_idx", lambda groups: groups.max()),
        ("fp8 by matrix", "weight", lambda weight: weight[:, :0]),
        ("packed int4", "weight_shape", lambda shape: shape + 32),
        ("packed int4 with zeros", "weight_zero_point", lambda words: words[:-1]),
        ("packed int8", "weight_scale", lambda scales: scales[:-1]),
        ("fp8 in blocks", "weight_scale_inv", lambda scales: scales[:, :-1]),
        ("fp8 by matrix", "weight_scale", None),
        ("nvfp4", "weight_global_scale", None),
        ("nvfp4", "weight_global_scale", lambda scale: scale.expand(2)),
        ("nvfp4", "weight_global_scale", lambda scale: 0 * scale),
        ("nvfp4", "weight_scale", lambda scales: scales[:, :-1]),
        ("nvfp4", "weight_scale", lambda scales: scales.float()),
        ("nvfp4 of modelopt", "weight_scale_2", None),
        ("nvfp4 of modelopt", "weight", lambda codes: codes[:, :-4]),
    ],
)
def test_tensors_that_are_missing_or_do_not_fit_are_named(
    quantized: Quantized, layout: str, part: str, change: Callable[[Any], Any] | None, tmp_path: Path
) -> None:
    shutil.copytree(quantized("llama", layout)[0], tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensor = tensors.pop(_OUT + part)
    if change is not None:
        tensors[_OUT + part] = change(tensor).contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=_OUT.removesuffix(".")):
        _load(tmp_path)
