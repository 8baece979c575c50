"""`python armed.py <module or file> <arguments>` runs it with a fault at one of the product's crash points.

FAULT_AT="after emit 3 kill": the process is killed the third time that it reaches the point (`after`, `emit`).
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time
import warnings
from types import ModuleType

from penstock.runtime import crash_points

FAULTS = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "hang": lambda: time.sleep(3600),
}
"""`hang` holds up the thread that is at the point."""


def arm(spec: str) -> None:
    """Install the fault."""
    when, what, count, fault = spec.split()
    times_left = int(count)

    def point(at: str, name: str) -> None:
        nonlocal times_left
        if (at, name) == (when, what):
            times_left -= 1
            if times_left == 0:
                FAULTS[fault]()

    crash_points.point = point


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, so that a killed test leaves no process."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def run(command: list[str]) -> None:
    """Run a module, a file or the program after `-c` as Python's own command line does, also after `-W error`."""
    if command[:2] == ["-W", "error"]:
        warnings.simplefilter("error")
        command = command[2:]
    sys.argv = command[1:] if command[0] == "-m" else command
    if command[0] == "-c":
        sys.argv = ["-c", *command[2:]]
        sys.modules["__main__"] = main_module = ModuleType("__main__")
        exec(compile(command[1], "<string>", "exec"), vars(main_module))
    elif sys.argv[0].endswith(".py"):
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    end_with_parent()
    if os.environ.get("FAULT_AT"):
        arm(os.environ["FAULT_AT"])
    run(sys.argv[1:])
