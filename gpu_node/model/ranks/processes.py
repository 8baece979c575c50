"""Ranks as processes of this host. Each runs under a process guard, which ends it with the process of rank 0."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock.runtime.logging import inherited_log_variables
from penstock.runtime.process_guard import guarded

_END_PATIENCE_S = 2.0


class RankProcess:
    """A rank in a process of its own."""

    def __init__(self, module: str, config: Mapping[str, Any], descriptors: Sequence[int]) -> None:
        """Start `python -m module CONFIG`, CONFIG being JSON. It inherits `descriptors`, under the same numbers.

        It reports to the descriptor in CONFIG's `report`.
        """
        self._reports, report = os.pipe()
        try:
            command = [sys.executable, "-P", "-m", module, json.dumps({**config, "report": report})]
            inherited = *descriptors, report
            # stdout may be read by a supervisor, which understands the node's own lines alone.
            self._guard = subprocess.Popen(
                guarded(command, grace_s=0.0, descriptors=inherited),
                stdin=subprocess.PIPE,
                stdout=2,
                pass_fds=inherited,
                start_new_session=True,
                env=os.environ | inherited_log_variables(),
            )
        except BaseException:
            os.close(self._reports)
            raise
        finally:
            os.close(report)

    def fileno(self) -> int:
        """The descriptor of its reports. Its end means that guard and rank have ended."""
        return self._reports

    def is_stopped(self) -> bool:
        """Whether a signal has stopped the rank, or its guard."""
        try:
            stats = [Path(f"/proc/{pid}/stat").read_text() for pid in (self._guard.pid, *self._children())]
        except (FileNotFoundError, ProcessLookupError):
            return False  # It has just ended, which its reports show.
        return any(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)

    def _children(self) -> list[int]:
        pid = self._guard.pid
        with suppress(FileNotFoundError, ProcessLookupError):
            return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        return []

    def kill(self) -> None:
        """Close the guard's pipe: the guard then kills the rank."""
        if self._guard.stdin is not None:
            self._guard.stdin.close()

    def close(self) -> None:
        """Wait for the guard. It outlives the rank, and nothing can stop it but SIGSTOP."""
        self.kill()
        try:
            self._guard.wait(_END_PATIENCE_S)
        except subprocess.TimeoutExpired:
            # A rank dies with its guard (PR_SET_PDEATHSIG), but not one that was stopped between fork and exec.
            for pid in self._children():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._guard.kill()
            self._guard.wait()
        with suppress(OSError):
            os.close(self._reports)


def report(descriptor: int, event: Mapping[str, Any]) -> None:
    """Report to rank 0, in a rank."""
    with suppress(OSError):  # Rank 0 may be gone; the guard then ends this process.
        os.write(descriptor, json.dumps(event).encode() + b"\n")
