"""Quantized models in the layouts of other tools, each made once per session."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from fixtures.mxfp4_checkpoint import write_mxfp4
from fixtures.quantized_checkpoint import LAYOUTS, TOKEN_IDS, write_quantized
from fixtures.random_families import make_family_model
from numpy.typing import NDArray

Quantized: TypeAlias = Callable[[str, str], tuple[Path, NDArray[Any]]]


@pytest.fixture(scope="session")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Quantized:
    """Folder of a family's model in a layout, and transformers' logits of TOKEN_IDS for its dequantized values."""
    import torch
    from transformers import AutoModelForCausalLM

    @cache
    def plain(family: str) -> tuple[Path, Any]:
        # Of 128 columns there are several groups of each size.
        folder = make_family_model(tmp_path_factory.mktemp("plain"), family, "bfloat16", intermediate_size=128)
        return folder, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    @cache
    def make(family: str, layout: str) -> tuple[Path, NDArray[Any]]:
        (folder, model), target = plain(family), tmp_path_factory.mktemp("quantized")
        meant = write_quantized(folder, LAYOUTS[layout], target)
        with torch.inference_mode():
            for name, weight in model.named_parameters():
                if name in meant:
                    weight.copy_(meant[name])
            return target, model(torch.tensor([TOKEN_IDS])).logits[0].numpy()

    return make


@pytest.fixture(scope="session")
def mxfp4_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, NDArray[Any]]:
    """Folder of a small gpt-oss with experts in MXFP4, and transformers' logits of TOKEN_IDS for what they mean."""
    import torch
    from transformers import AutoModelForCausalLM

    folder = make_family_model(tmp_path_factory.mktemp("plain"), "gpt-oss", "bfloat16", initializer_range=0.1)
    target = tmp_path_factory.mktemp("mxfp4")
    meant = write_mxfp4(folder, target)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        for name, weight in model.named_parameters():
            if name in meant:
                weight.copy_(meant[name])
        return target, model(torch.tensor([TOKEN_IDS])).logits[0].numpy()
