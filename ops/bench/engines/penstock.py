"""The bare engine, in process. Options are fields of EngineConfig."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from bench import peers
from bench.child import Spec, main
from bench.drive import Saw
from bench.engines.stepped import SteppedSession
from bench.workload import BenchRequest
from penstock.contract.job import SamplingParams
from penstock.gpu_node.engine.records import EngineRequest
from penstock.gpu_node.engine.worker import EngineLike

EMPTY_CACHE = "BENCH_EMPTY_CACHE"
"""The variable that makes a run load as for the first time."""
KERNELS = "native"
"""The cache's folder of compiled kernels."""


class PenstockSession(SteppedSession):
    def __init__(self, engine: EngineLike) -> None:
        self._engine = engine

    def add(self, i: int, request: BenchRequest) -> None:
        params = SamplingParams(temperature=0, max_tokens=request.num_output, ignore_eos=True)
        self._engine.add(EngineRequest(str(i), request.prompt, params, seed=0))

    def bind_thread(self) -> None:
        """As a node does with the thread that steps."""
        self._engine.bind_thread()

    def has_work(self) -> bool:
        return self._engine.has_work()

    def step(self, saw: Saw) -> None:
        for output in self._engine.step():
            if output.token_ids:
                saw(int(output.request_id), len(output.token_ids))
        # As a node does: requests that come while a step is computed are planned into the next one.
        self._engine.wait()

    def extra(self) -> dict[str, float]:
        """The step's breakdown."""
        stats = asdict(self._engine.stats())
        return {f"step_{name.removeprefix('step_')}": value for name, value in stats.items() if "_ms" in name}


@contextmanager
def open_session(spec: Spec) -> Iterator[PenstockSession]:
    from penstock.gpu_node.engine.config import EngineConfig
    from penstock.gpu_node.engine.engine import Engine
    from penstock.gpu_node.model.native.runner import NativeRunner

    with empty_cache() if os.environ.get(EMPTY_CACHE) else nullcontext():
        engine = Engine(EngineConfig(model=spec.weights, **spec.options))
        runner = engine._runner
        if isinstance(runner, NativeRunner) and not os.environ.get(EMPTY_CACHE):
            # Otherwise the first run on a machine would measure the packing.
            runner.wait_until_packed()
        yield PenstockSession(engine)


@contextmanager
def empty_cache() -> Iterator[None]:
    """As at the first load of a model on a machine: nothing is cached but the compiled kernels."""
    from penstock.runtime.cache_folders import cache_folder

    kernels = cache_folder() / KERNELS
    peers.BUILD.mkdir(exist_ok=True)
    # On the disk of the weights: in memory it would be faster than a user's.
    with TemporaryDirectory(dir=peers.BUILD) as folder:
        (Path(folder) / KERNELS).symlink_to(kernels)
        os.environ["PENSTOCK_CACHE"] = folder
        yield


if __name__ == "__main__":
    main(open_session)
