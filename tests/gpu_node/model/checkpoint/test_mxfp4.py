"""gpt-oss with experts in MXFP4, as its published files have them: the values that the numbers of four bits mean."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from fakes.runners.runner_options import runner_options
from fixtures.plans import logits_alone
from fixtures.quantized_checkpoint import TOKEN_IDS
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.loading.load import load_model

Model: TypeAlias = tuple[Path, NDArray[Any]]
OPTIONS = {"max_num_seqs": 1, "max_model_len": 256}


def test_torch_computes_with_the_values_of_the_blocks(mxfp4_model: Model) -> None:
    runner: Any = load_model(str(mxfp4_model[0]), runner_options(**OPTIONS), lambda *_: None).runner
    np.testing.assert_allclose(logits_alone(runner, TOKEN_IDS), mxfp4_model[1], rtol=0, atol=1e-4)


Change: TypeAlias = Callable[[dict[str, torch.Tensor]], None]
GATES = "model.layers.3.mlp.experts.gate_up_proj"


def _without_scales(tensors: dict[str, torch.Tensor]) -> None:
    tensors.pop(f"{GATES}_scales")


def _with_long_blocks(tensors: dict[str, torch.Tensor]) -> None:
    blocks = tensors[f"{GATES}_blocks"]
    tensors[f"{GATES}_blocks"] = blocks.reshape(*blocks.shape[:2], -1, 32).contiguous()


def _with_fewer_experts(tensors: dict[str, torch.Tensor]) -> None:
    for part in ("blocks", "scales"):
        tensors[f"{GATES}_{part}"] = tensors[f"{GATES}_{part}"][:5].contiguous()


def _with_fewer_biases(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{GATES}_bias"] = tensors[f"{GATES}_bias"][:5].contiguous()


def _with_narrow_blocks(tensors: dict[str, torch.Tensor]) -> None:
    for part in ("blocks", "scales"):
        tensors[f"{GATES}_{part}"] = tensors[f"{GATES}_{part}"][:, :, :1].contiguous()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_without_scales, "has no tensor model.layers.3.mlp.experts.gate_up_proj_scales"),
        (_with_long_blocks, r"gate_up_proj_blocks and _scales are u8 \[6, 128, 1, 32\] and u8 \[6, 128, 2\]"),
        (_with_fewer_experts, "gate_up_proj_blocks has 5 experts"),
        (_with_fewer_biases, "has no tensor model.layers.3.mlp.experts.5.gate_proj.bias"),
        (_with_narrow_blocks, r"gate_proj.weight has shape \[64, 32\], the config says \[64, 64\]"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    mxfp4_model: Model, change: Change, said: str, tmp_path: Path
) -> None:
    for path in mxfp4_model[0].iterdir():
        (tmp_path / path.name).symlink_to(path)
    tensors = load_file(mxfp4_model[0] / "model.safetensors")
    change(tensors)
    (tmp_path / "model.safetensors").unlink()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=said):
        load_model(str(tmp_path), runner_options(**OPTIONS), lambda *_: None)
