"""GGUF files to a folder of safetensors and tokenizer files, through transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.contract.errors import ConfigError


def convert_gguf(gguf: Path, folder: Path, progress: Callable[[str, float], None]) -> None:
    """Write `gguf`, dequantised to bfloat16, to a new `folder`. Raises ConfigError for a file that cannot be read."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    auto_model: Any = AutoModelForCausalLM
    auto_tokenizer: Any = AutoTokenizer
    progress("convert", 0.0)
    try:
        tokenizer = auto_tokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        progress("convert", 0.3)
        model = auto_model.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
        )
    except Exception as error:
        # A file of unknown origin through a foreign parser: it may fail in any way.
        raise ConfigError(f"cannot read {gguf}: {error}") from error
    progress("convert", 0.8)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder, safe_serialization=True)
    progress("convert", 1.0)
