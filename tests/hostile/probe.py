"""`python probe.py <module or file> <arguments>` runs it, and logs what holds its event loops.

If a timer of a loop fires late, a callback held the loop, or native code held the interpreter lock. Each hold becomes
one JSON line of the file LOOP_PROBE. If another thread gets the lock meanwhile, the line has the innermost frames of
the loop's stack. Times are of the monotonic clock, which all processes share. A variable MAX_RENDER_CPU_S is a node's
limit of that name.

A thread must not measure: a busy loop whose timers run on time can still keep the lock from it for 100 ms. A busy
machine makes timers late too. So the time that the loop's thread waited for a core, as the kernel counts it, is
subtracted.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import runpy
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, TextIO

PERIOD_S = 0.004
NOTED_S = 0.02
"""Shorter holds are not written down."""
LOOKED_AT_S = 0.012
"""When a timer is so late, the loop's stack is looked at."""
MAX_FRAMES = 4


class CoreWait:
    """How long a thread has waited for a core."""

    def __init__(self, native_id: int) -> None:
        self._path = f"/proc/self/task/{native_id}/schedstat"
        self._last_s = self._now_s()

    def since_last_s(self) -> float:
        """Return the seconds since the last call."""
        last_s, self._last_s = self._last_s, self._now_s()
        return self._last_s - last_s

    def _now_s(self) -> float:
        try:
            return int(Path(self._path).read_text().split()[1]) / 1e9
        except (OSError, IndexError):
            return 0.0


class LoopWatch:
    """Watches one loop by a timer in it. While that timer is late, a thread samples the loop's stack."""

    def __init__(self, loop: Any, file: TextIO) -> None:
        self._loop = loop
        self._thread_id = threading.get_ident()
        self._waits = CoreWait(threading.get_native_id())
        self._file = file
        self._due_s = math.inf
        self._frames = ""

    def start(self) -> None:
        """Start watching. Runs on the loop."""
        threading.Thread(target=self._look_at_stacks, daemon=True, name="loop probe").start()
        self._set_timer()

    def _set_timer(self) -> None:
        self._frames = ""
        self._due_s = time.monotonic() + PERIOD_S
        self._loop.call_later(PERIOD_S, self._come)

    def _come(self) -> None:
        late_s, waited_s = time.monotonic() - self._due_s, self._waits.since_last_s()
        if late_s - waited_s >= NOTED_S:
            line = {"at": self._due_s, "held_s": late_s - waited_s, "late_s": late_s, "frames": self._frames}
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        self._set_timer()

    def _look_at_stacks(self) -> None:
        while not self._loop.is_closed():
            time.sleep(PERIOD_S)
            if time.monotonic() - self._due_s > LOOKED_AT_S and not self._frames:
                self._frames = self._stack()

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._thread_id)
        stack = traceback.extract_stack(frame)[-MAX_FRAMES:] if frame is not None else []
        return " < ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in reversed(stack))


def watch_loops(path: str) -> None:
    """Watch each loop that starts in this process from now on."""
    assert "uvloop" not in sys.modules, "its loops would not be watched"
    file = Path(path).open("a", encoding="utf-8")  # noqa: SIM115  open for the process's life
    begin = asyncio._set_running_loop
    watched: set[int] = set()

    def set_running(loop: Any) -> None:
        begin(loop)
        if loop is not None and id(loop) not in watched:
            watched.add(id(loop))
            loop.call_soon(LoopWatch(loop, file).start)

    # asyncio's own loops look it up in the first place, uvloop's, when it is imported, in the second.
    asyncio.events._set_running_loop = set_running
    asyncio._set_running_loop = set_running


if __name__ == "__main__":
    armed = runpy.run_path(str(Path(__file__).parents[1] / "fakes" / "processes" / "armed.py"))
    armed["end_with_parent"]()
    if os.environ.get("LOOP_PROBE"):
        watch_loops(os.environ["LOOP_PROBE"])
    if os.environ.get("MAX_RENDER_CPU_S") and "node" in sys.argv:
        from penstock.gpu_node.engine.text import chat

        chat.MAX_RENDER_CPU_S = float(os.environ["MAX_RENDER_CPU_S"])
    armed["run"](sys.argv[1:])
