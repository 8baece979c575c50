"""`python probe.py <module or file> <arguments>` runs it, and writes down what holds up its event loops.

A thread posts a callback to each running loop every few milliseconds. A callback that comes late was held up by another
one, or by native code that kept the interpreter lock. Each hold becomes one JSON line of the file LOOP_PROBE. Of a hold
by Python code the line has the innermost frames. Times are of the monotonic clock, which all processes share.

A busy machine makes callbacks late too. The time that a thread waited for a core, as the kernel counts it, is no hold.
"""

from __future__ import annotations

import asyncio
import json
import os
import runpy
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

PERIOD_S = 0.004
NOTED_S = 0.02
"""Shorter holds are not written down."""
LOOKED_AT_S = 0.012
"""A callback that is out for so long is looked for on the loop's stack."""
MAX_FRAMES = 4


class CoreWait:
    """How long a thread has waited for a core."""

    def __init__(self, native_id: int) -> None:
        self._path = f"/proc/self/task/{native_id}/schedstat"
        self._last_s = self._now_s()

    def since_last_s(self) -> float:
        """Since it was last asked."""
        last_s, self._last_s = self._last_s, self._now_s()
        return self._last_s - last_s

    def _now_s(self) -> float:
        try:
            return int(Path(self._path).read_text().split()[1]) / 1e9
        except (OSError, IndexError):
            return 0.0


class LoopWatch:
    """Watches one loop from a thread of its own."""

    def __init__(self, loop: Any, file: TextIO) -> None:
        self._loop = loop
        self._thread_id = threading.get_ident()
        self._waits = CoreWait(threading.get_native_id())
        self._file = file
        self._came = threading.Event()
        self._came_s = 0.0

    def run(self) -> None:
        """Until the loop is closed or the process ends."""
        own_waits = CoreWait(threading.get_native_id())
        while not self._loop.is_closed():
            due_s = time.monotonic() + PERIOD_S
            time.sleep(PERIOD_S)
            self._came.clear()
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._come)
            frames = "" if self._came.wait(LOOKED_AT_S) else self._frames()
            # A loop that has stopped answers no more.
            while not self._came.wait(1.0):
                if self._loop.is_closed() or not self._loop.is_running():
                    return
            waited_s = max(self._waits.since_last_s(), own_waits.since_last_s())
            self._note(due_s, waited_s, frames)

    def _come(self) -> None:
        self._came_s = time.monotonic()
        self._came.set()

    def _frames(self) -> str:
        frame = sys._current_frames().get(self._thread_id)
        stack = traceback.extract_stack(frame)[-MAX_FRAMES:] if frame is not None else []
        return " < ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in reversed(stack))

    def _note(self, due_s: float, waited_s: float, frames: str) -> None:
        late_s = self._came_s - due_s
        held_s = late_s - waited_s
        if held_s >= NOTED_S:
            line = {"at": due_s, "held_s": held_s, "late_s": late_s, "frames": frames}
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()


def watch_loops(path: str) -> None:
    """Watches each loop that runs in this process from now on."""
    file = Path(path).open("a", encoding="utf-8")  # noqa: SIM115  open for the process's life
    begin = asyncio._set_running_loop
    watched: set[int] = set()

    def set_running(loop: Any) -> None:
        begin(loop)
        if loop is not None and id(loop) not in watched:
            watched.add(id(loop))
            threading.Thread(target=LoopWatch(loop, file).run, daemon=True, name="loop probe").start()

    # asyncio's own loops look it up in the first place, uvloop's, when it is imported, in the second.
    asyncio.events._set_running_loop = set_running
    asyncio._set_running_loop = set_running


if __name__ == "__main__":
    armed = runpy.run_path(str(Path(__file__).parents[1] / "fakes" / "processes" / "armed.py"))
    armed["end_with_parent"]()
    if os.environ.get("LOOP_PROBE"):
        watch_loops(os.environ["LOOP_PROBE"])
    armed["run"](sys.argv[1:])
