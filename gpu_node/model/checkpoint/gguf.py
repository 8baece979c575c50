"""GGUF files to what Hugging Face's format holds, through transformers; nothing here runs when the result is cached."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.checkpoint.gguf_header import read_header


def describe_gguf(gguf: Path, folder: Path, progress: Callable[[str, float], None]) -> None:
    """Write config and tokenizer of `gguf` to a new `folder`. Raises ConfigError for a file that cannot be read."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    auto_tokenizer: Any = AutoTokenizer
    auto_model: Any = AutoModelForCausalLM
    progress("convert", 0.0)
    try:
        # Says what a file lacks that was cut short; that parser says which of its arrays it could not shape.
        read_header(np.memmap(gguf, np.uint8, "r").data)
        config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
        progress("convert", 0.5)
        tokenizer = auto_tokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        # Without weights: it only knows its class and what ends a text.
        with torch.device("meta"):
            model = auto_model.from_config(config, dtype=torch.bfloat16)
    except Exception as error:
        # A file of unknown origin through a foreign parser: it may fail in any way.
        raise ConfigError(f"cannot read {gguf}: {error}") from error
    model.config.architectures = [type(model).__name__]
    tokenizer.save_pretrained(folder)
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    progress("convert", 1.0)
