"""Which product modules run: `threading.setprofile` gives every thread that starts later a profile hook."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from tests.source_tree import ROOT

COUNTED = ("gateway/", "gpu_node/", "kernels/", "producer/", "queue/")
"""Folders of the package that count. The contract, the runtime and the commands do not."""
NOT_COUNTED = ("queue/broker/scripts.py",)
"""The call of a Lua script."""
ENGINE_THREAD = "penstock-engine"
ENGINE_FILE, COMPUTING = "engine/engine.py", ("step", "wait")
"""The calls of the engine in which steps are planned, computed and committed."""


@dataclass
class TracedRun:
    """The modules in which a function ran, as paths below the package."""

    around_steps: set[str] = field(default_factory=set)
    """Those that run on any thread while the engine does not compute a step there."""
    steps: list[set[str]] = field(default_factory=list)
    """Those on the engine's thread, from the begin of each step to that of the next one."""


class TracedModules:
    """Records the modules in which a function runs, between `start` and `stop`."""

    def __init__(self) -> None:
        self._run: TracedRun | None = None
        self._is_computing = False
        self._names: dict[str, str] = {}
        """File → its path below the package; empty if it does not count."""

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Trace every thread that starts in the block."""
        threading.setprofile(self._hook)
        try:
            yield
        finally:
            threading.setprofile(None)

    def start(self) -> None:
        """Begin a recording."""
        self._run = TracedRun()

    def stop(self) -> TracedRun:
        """End the recording and return it."""
        run, self._run = self._run, None
        assert run is not None
        return run

    def _hook(self, frame: FrameType, event: str, _: Any) -> None:
        run = self._run
        if run is None or event not in ("call", "return"):
            return
        code = frame.f_code
        name = self._name_of(code.co_filename)
        if not name or code.co_name == "<module>":  # Most calls are those of libraries.
            return
        on_engine_thread = threading.current_thread().name == ENGINE_THREAD
        if on_engine_thread and code.co_name in COMPUTING and code.co_filename.endswith(ENGINE_FILE):
            self._is_computing = event == "call"
            if self._is_computing and code.co_name == "step":
                run.steps.append(set())
        if event == "call":
            if on_engine_thread and run.steps:
                run.steps[-1].add(name)
            if not (on_engine_thread and self._is_computing):
                run.around_steps.add(name)

    def _name_of(self, file: str) -> str:
        name = self._names.get(file)
        if name is None:
            below = file.removeprefix(f"{ROOT}/src/penstock/")
            name = self._names[file] = below if below.startswith(COUNTED) and below not in NOT_COUNTED else ""
        return name
