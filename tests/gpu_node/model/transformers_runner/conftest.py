"""Small random models of classes that no family describes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from fixtures.small_transformers import quiet, write_small
from fixtures.tiny_model import write_tokenizer


@pytest.fixture(scope="session")
def class_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a random model of a class, with a tokenizer of as many tokens as the model has."""

    @cache
    def make(architecture: str) -> Path:
        folder = tmp_path_factory.mktemp(architecture)
        with quiet():
            write_small(architecture, folder)
            write_tokenizer(folder, 384)
        return folder

    return make
