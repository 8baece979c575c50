"""A decode step of a node runs few modules, so that a reader can hold them in mind."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from fakes.processes.running_node import running_node

import penstock
from penstock.contract.job import SamplingParams
from penstock.gpu_node.engine import Engine
from penstock.producer.client import AsyncClient

PACKAGE = Path(penstock.__file__).resolve().parent
ROOT = PACKAGE.parent
PRODUCT = ("cli", "gateway", "gpu_node", "kernels", "penstock", "producer")
NOT_COUNTED = ("penstock/contract/", "penstock/runtime/")
MAX_MODULES = 32
FIRST, LAST = 4, 19
"""The recorded steps: behind the prompt's, before the last token's, and one of them fills a block of 16 tokens."""


class StepRecorder:
    """Records the files in which the engine's thread calls a function, from one decode step to another."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.num_steps = 0

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call" or threading.current_thread().name != "penstock-engine":
            return
        if frame.f_code.co_qualname == "EngineWorker._step":
            self.num_steps += 1
        if FIRST <= self.num_steps <= LAST:
            self.files.add(frame.f_code.co_filename)

    @property
    def modules(self) -> list[str]:
        """The product's modules among the files, without those of contract and runtime."""
        real = (Path(file).resolve() for file in self.files if not file.startswith("<"))
        names = {str(path.relative_to(ROOT)) for path in real if path.is_relative_to(ROOT)}
        return sorted(name for name in names if name.startswith(PRODUCT) and not name.startswith(NOT_COUNTED))


async def test_a_decode_step_runs_few_modules(redis_url: str, make_engine: Callable[..., Engine]) -> None:
    recorder = StepRecorder()
    engine = make_engine(runner="native")
    threading.setprofile(recorder)
    try:
        async with running_node(redis_url, engine, pool="tiny"), AsyncClient(redis_url) as client:
            params = SamplingParams(max_tokens=LAST + 5, ignore_eos=True, temperature=1.0, seed=1)
            result = await (await client.submit([3, 4, 5], params=params)).result()
    finally:
        threading.setprofile(None)
        sys.setprofile(None)
    assert len(result.choices[0].token_ids) == LAST + 5
    modules = recorder.modules
    print(f"{len(modules)} modules:", *modules, sep="\n")
    assert "gpu_node/engine/engine.py" in modules
    assert len(modules) <= MAX_MODULES, modules
