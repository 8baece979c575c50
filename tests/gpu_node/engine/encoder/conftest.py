"""Small random encoders, made once: one that embeds, one that scores pairs, and one that labels tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fixtures.small_transformers import quiet
from fixtures.tiny_encoder import write_encoder, write_modules

from penstock.gpu_node.engine.encoder.engine import EncoderEngine


@dataclass(frozen=True)
class Made:
    """An engine, and the module of transformers with the same weights."""

    folder: Path
    module: Any
    engine: EncoderEngine


def made(folder: Path, architecture: str = "BertModel", **changes: Any) -> Made:
    with quiet():
        module = write_encoder(folder, architecture, **changes)
    if architecture == "BertModel":
        write_modules(folder, "Pooling", "Normalize")
    return Made(folder, module, EncoderEngine(str(folder), num_threads=1))


@pytest.fixture(scope="session")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return made(tmp_path_factory.mktemp("embedder"))


@pytest.fixture(scope="session")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return made(tmp_path_factory.mktemp("scorer"), "BertForSequenceClassification", num_labels=1)


@pytest.fixture(scope="session")
def labeler(tmp_path_factory: pytest.TempPathFactory) -> Made:
    names = {0: "B-PER", 1: "I-PER", 2: "B-LOC", 3: "O"}
    return made(tmp_path_factory.mktemp("labeler"), "BertForTokenClassification", id2label=names)
