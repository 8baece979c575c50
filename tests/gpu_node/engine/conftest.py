"""The engine on the tiny model, and the reference for its results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.gpu_node.engine import Engine


@pytest.fixture(scope="session")
def model(tiny_model: Path) -> Any:
    """The tiny model in transformers."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model)


@pytest.fixture(scope="module")
def plain(make_engine: Callable[..., Engine]) -> Engine:
    """An engine with blocks for every sequence."""
    return make_engine()
