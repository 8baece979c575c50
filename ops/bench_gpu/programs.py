"""Programs with a time limit, which holds for the processes that they start too."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Ended:
    """How a program ended, and what it printed until then."""

    returncode: int | None
    """None: it was killed at its time limit."""
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        """Both streams, one after the other."""
        return self.stdout + self.stderr


def run_program(
    words: Sequence[str | Path], limit_s: float, env: Mapping[str, str] | None = None, folder: Path | None = None
) -> Ended:
    """Run a program. At the limit, kill it and its children: a tool's child would continue to use the GPU.

    env: added to the environment.
    """
    process = subprocess.Popen(
        words,
        env=os.environ | (env or {}),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Not a session of its own: what ends this process's session should end the program too.
        process_group=0,
    )
    with process:
        try:
            stdout, stderr = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return Ended(None, *process.communicate())
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return Ended(process.returncode, stdout, stderr)
