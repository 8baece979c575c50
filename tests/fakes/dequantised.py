"""GGUF files as folders of plain weights, which transformers and other engines read."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from penstock.gpu_node.model.checkpoint.conversion_cache import built_once
from penstock.gpu_node.model.checkpoint.source import resolve_model


def dequantised(model: Path | str) -> Path:
    """A folder that holds a model's weights as safetensors: its own, or one made of its GGUF file in bfloat16.

    It is made once a machine, in the cache folder.
    """
    source = resolve_model(str(model), lambda _stage, _fraction: None)
    gguf = source.gguf
    if gguf is None:
        return source.folder
    return built_once(f"{source.folder.name}-bfloat16", lambda folder: _write(gguf, source.folder, folder))


def _write(gguf: Path, described: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    auto_model: Any = AutoModelForCausalLM
    model = auto_model.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(folder)
    shutil.copytree(described, folder, dirs_exist_ok=True)
