"""Opening a tokenizer beside its runner: which error is raised, and that no thread is left."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.contract.errors import ConfigError
from penstock.gpu_node.engine import Engine

WEIGHTS, TOKENIZER = "model.safetensors", "tokenizer.json"


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Iterator[Path]:
    before = set(threading.enumerate())
    yield Path(shutil.copytree(tiny_model, tmp_path / "model"))
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize(
    ("broken", "named"), [([WEIGHTS], WEIGHTS), ([TOKENIZER], TOKENIZER), ([WEIGHTS, TOKENIZER], WEIGHTS)]
)
def test_a_broken_file_is_named_the_weights_first(folder: Path, broken: list[str], named: str) -> None:
    for name in broken:
        (folder / name).write_bytes(b"\x01broken")
    with pytest.raises(ConfigError, match=named):
        Engine(str(folder), runner="cpu", weight_cache=False)
