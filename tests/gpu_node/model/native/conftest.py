"""Native runners on small random models, loaded once for all tests that ask for the same one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from fakes.native import ISAS, built
from fakes.runners.runner_options import runner_options
from fixtures.random_families import make_family_model
from fixtures.random_llama import make_llama

from penstock.gpu_node.model.checkpoint.conversion_cache import cache_folder
from penstock.gpu_node.model.loading.load import load_model
from penstock.gpu_node.model.native import load as native_load
from penstock.gpu_node.model.native.packing import Packer
from penstock.gpu_node.model.native.runner import NativeRunner
from penstock.gpu_node.model.protocol import LoadedModel
from penstock.kernels.cpu.build import BuildError, library_path
from penstock.kernels.cpu.probe import Isa, best_isa, cpu_flags
from penstock.kernels.cpu.structs import Format

LoadNative = Callable[..., NativeRunner]
OPTIONS: dict[str, Any] = {
    "runner": "native",
    "dtype": "bfloat16",
    "quantization": "none",
    "num_kv_blocks": 160,
    "max_num_seqs": 32,  # so many that windows have no blocks of their own, whose tables `plans.py` does not make
    "num_threads": 1,
}


@pytest.fixture(scope="session", params=ISAS)
def isa(request: pytest.FixtureRequest) -> Isa:
    """An instruction set that this CPU has and that the kernels can be built for."""
    built(request.param)
    chosen: Isa = request.param
    return chosen


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Folder of a random Llama of given shapes."""

    @cache
    def make(**shapes: Any) -> Path:
        return make_llama(tmp_path_factory.mktemp("llama"), **shapes)

    return make


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Folder of a random model of a family, in bfloat16."""

    @cache
    def make(name: str, **changes: Any) -> Path:
        return make_family_model(tmp_path_factory.mktemp("family"), name, "bfloat16", **changes)

    return make


@pytest.fixture(scope="session")
def load_native(isa: Isa) -> Iterator[LoadNative]:
    """Loads a model for an instruction set, once for each set of options."""
    loaded: list[NativeRunner] = []

    @cache
    def load(folder: Path, **options: Any) -> NativeRunner:
        with mock.patch.object(native_load, "library_path", lambda isa, *_: built(isa)):
            wanted = runner_options(**OPTIONS | {"cpu_isa": isa} | options)
            model: LoadedModel = load_model(str(folder), wanted, lambda stage, fraction: None)
        assert isinstance(model.runner, NativeRunner)
        loaded.append(model.runner)
        return model.runner

    yield load
    for runner in loaded:
        runner.close()


@pytest.fixture(scope="session")
def best_library() -> Path:
    """The library that an engine takes on this machine; skips where there is none."""
    best = best_isa(cpu_flags())
    if best is None:
        pytest.skip("this CPU has none of the kernels' instruction sets")
    try:
        return library_path(best, cache_folder() / "native", lambda fraction: None)
    except BuildError as error:
        pytest.skip(f"no kernels here: {error}")


@pytest.fixture(name="cache")
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of packed weights, which does not exist yet."""
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "weights"


@pytest.fixture(scope="module")
def library(isa: Isa) -> Path:
    """The kernels, which the cache of the machine keeps."""
    return built(isa)


@pytest.fixture
def load(isa: Isa, library: Path, cache: Path) -> LoadNative:
    """Load a model as two nodes of a machine do. Wait until it is packed if the test asks for it."""

    def load(folder: Path, *, waits: bool = True, **options: Any) -> NativeRunner:
        with mock.patch.object(native_load, "library_path", lambda *_: library):
            wanted = {"runner": "native", "dtype": "bfloat16", "num_threads": 1, "weight_cache": True, "cpu_isa": isa}
            wanted |= options
            runner = load_model(str(folder), runner_options(**wanted), lambda stage, fraction: None).runner
        assert isinstance(runner, NativeRunner)
        if waits:
            runner.wait_until_packed()
        return runner

    return load


@pytest.fixture
def packings() -> Iterator[list[Packer]]:
    """Counts how often a model is packed. Reading the checkpoint's rows does not count."""
    packed: list[Packer] = []
    pack = Packer.pack

    def counted(packer: Packer) -> set[Format]:
        if not packer._on_read:
            packed.append(packer)
        return pack(packer)

    with mock.patch.object(Packer, "pack", counted):
        yield packed
