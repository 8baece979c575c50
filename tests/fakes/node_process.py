"""Node processes for tests: started, waited for, killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

REFERENCE_NODE = str(Path(__file__).parent / "reference_node.py")


class NodeProcess:
    """`python -m penstock.gpu_node`, or the reference node when no model is named; settings by their field names."""

    def __init__(self, redis_url: str, *, step_s: float = 0.0, **settings: Any) -> None:
        command = ["-m", "penstock.gpu_node"] if "model" in settings else [REFERENCE_NODE]
        env = {f"PENSTOCK_NODE_{name.upper()}": str(value) for name, value in settings.items()}
        env |= {"PENSTOCK_REDIS_URL": redis_url, "PENSTOCK_NODE_PROGRESS": "json", "REFERENCE_STEP_S": str(step_s)}
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed by __exit__
        self._process = subprocess.Popen(
            [sys.executable, *command], env=os.environ | env, stdout=subprocess.PIPE, stderr=self._log
        )

    def wait_ready(self) -> Self:
        """Until it has joined its pool."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if json.loads(line)["event"] == "ready":
                return self
        raise AssertionError(f"the node ended with status {self._process.wait()} before it was ready:\n{self.log}")

    @property
    def log(self) -> str:
        """What it has logged so far."""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), size, 0).decode(errors="replace")

    def kill(self) -> None:
        """SIGKILL, now."""
        self._process.kill()
        self._process.wait()

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal."""
        self._process.send_signal(number)

    def stop(self) -> int:
        """SIGTERM, and the exit status after the drain."""
        self._process.terminate()
        return self._process.wait(60)

    def __enter__(self) -> Self:
        return self.wait_ready()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None:
            print(f"node {self._process.pid}, status {self._process.poll()}:\n{self.log}", file=sys.stderr)
        self._process.kill()
        self._process.wait()
        self._log.close()
        if self._process.stdout is not None:
            self._process.stdout.close()
