"""Random low-rank adapters in PEFT's format, and the same merged into a model of transformers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ALPHA = 4.0


def make_adapter(
    folder: Path, model: Any, *, rank: int = 4, seed: int = 0, dtype: str = "float32", only: str = "", **changes: Any
) -> Path:
    """Write an adapter of all matrices of a model's layers, or of those whose name ends with `only`."""
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": ALPHA, "use_rslora": False, "bias": "none"} | changes
    (folder / "adapter_config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape: int, std: float) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * std).to(getattr(torch, dtype))

    tensors = {}
    for name, linear in _linears(model):
        if name.endswith(only):
            rows, columns = linear.weight.shape
            tensors[f"base_model.model.{name}.lora_A.weight"] = numbers(rank, columns, std=columns**-0.5)
            tensors[f"base_model.model.{name}.lora_B.weight"] = numbers(rows, rank, std=0.3)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@torch.no_grad()
def merge(model: Any, folder: Path) -> Any:
    """Add an adapter's products to the weights of a model, in place."""
    config = json.loads((folder / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / (math.sqrt(config["r"]) if config["use_rslora"] else config["r"])
    tensors = load_file(folder / "adapter_model.safetensors")
    for name, linear in _linears(model):
        key = f"base_model.model.{name}.lora_%s.weight"
        if key % "A" in tensors:
            product = tensors[key % "B"].float() @ tensors[key % "A"].float()
            linear.weight += (scale * product).to(linear.weight.dtype)
    return model


def _linears(model: Any) -> Iterator[tuple[str, Any]]:
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and module is not head:
            yield name, module
