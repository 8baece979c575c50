"""Convert the config and tokenizer of a GGUF file to Hugging Face's format with transformers. The result is cached."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.checkpoint.gguf_header import read_header


def describe_gguf(gguf: Path, folder: Path, progress: Callable[[str, float], None]) -> None:
    """Write the config and tokenizer of `gguf` to a new `folder`. Raises ConfigError for an unreadable file."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    auto_tokenizer: Any = AutoTokenizer
    auto_model: Any = AutoModelForCausalLM
    progress("convert", 0.0)
    try:
        # Parse the header first, because its errors for truncated files are clearer than those of transformers.
        read_header(np.memmap(gguf, np.uint8, "r").data)
        config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
        progress("convert", 0.5)
        tokenizer = auto_tokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        # Without weights: only the class name and the end-of-sequence ids are needed.
        with torch.device("meta"):
            model = auto_model.from_config(config, dtype=torch.bfloat16)
    except Exception as error:
        # A third-party parser may raise any exception for a file of unknown origin.
        raise ConfigError(f"cannot read {gguf}: {error}") from error
    model.config.architectures = [type(model).__name__]
    tokenizer.save_pretrained(folder)
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    progress("convert", 1.0)
