"""Cases from public bug reports: one file a kind of fault, a case in about five lines, each as a user meets it.

`door` is the tiny model behind HTTP, as `penstock serve` starts it; `demo_door` is the demo model, for cases about the
texts of answers. A case about other files starts its own server with `fakes.served_model.served`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fakes.served_model import TOOL_TEMPLATE, served
from fixtures.tiny_model import make_tiny_model

from tests.journey.conftest import demo_file as demo_file


@pytest.fixture(scope="module")
def door(tiny: Path) -> Iterator[httpx.Client]:
    """A client of `penstock serve` with the tiny model. Its `base_url` is the gateway's."""
    with served(tiny, dtype="bfloat16") as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def demo_door(demo_file: Path) -> Iterator[httpx.Client]:
    """A client of the demo model, whose texts are letters."""
    with served(demo_file) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def tooled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """The tiny model with a chat template that takes tools: a grammar for it compiles in milliseconds."""
    folder = make_tiny_model(tmp_path_factory.mktemp("models") / "agent")
    (folder / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    with served(folder, dtype="bfloat16") as url, httpx.Client(base_url=url, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, which tests only read."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    """A copy of the model, for the test to change."""
    return Path(shutil.copytree(tiny, tmp_path / "copy"))
