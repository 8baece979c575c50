"""A rank of the torch runner in a process of its own, which gets its steps over a pipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from fakes.processes.python_process import PythonProcess
from fakes.runners.runner_options import runner_options
from fixtures import interpreter

from penstock.gpu_node.model.loading.load import find_model, load_found
from penstock.gpu_node.model.protocol import Adapter, CacheSizes, ModelRunner, Placement, StepHandle, StepPlan
from penstock.gpu_node.model.torch_common.ranks import RankLinks, joined


class FirstOfTwo:
    """Runs each step here as rank 0, and tells the other process to run it as rank 1."""

    max_in_flight = 1

    def __init__(self, first: ModelRunner, pipe: Connection) -> None:
        self._first = first
        self._pipe = pipe
        self.verifies_drafts = first.verifies_drafts

    @property
    def cache_sizes(self) -> CacheSizes:
        """Those of rank 0."""
        return self._first.cache_sizes

    @property
    def placement(self) -> Placement:
        """On the CPU."""
        return self._first.placement

    def bind_thread(self) -> None:
        """Do nothing."""

    def set_adapter(self, adapter_slot: int, adapter: Adapter) -> None:
        """Refuse it: adapters are not sent."""
        raise NotImplementedError

    def submit(self, plan: StepPlan) -> StepHandle:
        """Start a step at both ranks."""
        # Ranks on the CPU do not look at it; masks cannot be sent so.
        self._pipe.send(replace(plan, sampling=replace(plan.sampling, masks=None)))
        return self._first.submit(plan)


@contextmanager
def two_processes(model: Path, folder: Path, **options: Any) -> Iterator[FirstOfTwo]:
    """Start rank 1 in another process. Yield the runner of both. folder: an empty one."""
    address, words = str(folder / "pipe"), (str(model), str(folder), repr(options))
    command = f"import sys; sys.path[:0] = {sys.path}; from fakes.runners.remote_rank import follow; follow()"
    with Listener(address) as listener, PythonProcess("-c", command, *words, stdout=None, stderr=None) as process:
        pipe = listener.accept()
        with joined(folder, 0, *_sizes(options)) as links:
            yield FirstOfTwo(_load(model, options, links), pipe)
            pipe.close()
        assert process.wait(30) == 0


def _sizes(options: dict[str, Any]) -> tuple[int, int]:
    return options.get("tensor_parallel_size", 1), options.get("pipeline_parallel_size", 1)


def _load(model: Path, options: dict[str, Any], links: RankLinks) -> ModelRunner:
    given = runner_options(**options)
    found = find_model(str(model), given, lambda *_: None)
    return load_found(found, given, lambda *_: None, links).runner


def follow() -> None:
    """Run the steps that come over the pipe as rank 1, until it is closed."""
    model, folder, options = sys.argv[-3:]
    given = eval(options)
    if given.get("runner") == "gpu":
        os.environ["TRITON_INTERPRET"] = "1"
        interpreter.mend()
    with Client(str(Path(folder) / "pipe")) as pipe, joined(Path(folder), 1, *_sizes(given)) as links:
        runner = _load(Path(model), given, links)
        while True:
            try:
                plan = pipe.recv()
            except EOFError:
                return
            runner.submit(plan).result()
