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
from penstock.gpu_node.model.load import load_model
from penstock.gpu_node.model.native import load as native_load
from penstock.gpu_node.model.native.runner import NativeRunner
from penstock.gpu_node.model.protocol import LoadedModel
from penstock.kernels.cpu.build import BuildError, library_path
from penstock.kernels.cpu.probe import Isa, best_isa, cpu_flags

LoadNative = Callable[..., NativeRunner]
OPTIONS: dict[str, Any] = {
    "runner": "native",
    "dtype": "bfloat16",
    "quantization": "none",
    "num_kv_blocks": 160,
    "max_num_seqs": 16,
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
        with (
            mock.patch.object(native_load, "best_isa", lambda flags: isa),
            mock.patch.object(native_load, "library_path", lambda isa, *_: built(isa)),
        ):
            model: LoadedModel = load_model(
                str(folder), runner_options(**OPTIONS | options), lambda stage, fraction: None
            )
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
