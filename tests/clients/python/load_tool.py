"""Run the command line of a load tool, and read the report that it leaves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

MODEL_FOLDER = os.environ["PENSTOCK_MODEL_FOLDER"]
"""The served model's tokenizer is there."""
NUM_REQUESTS = 8
PROMPT_TOKENS = 48
OUTPUT_TOKENS = 16
CONCURRENCY = 2
TIMEOUT_S = 500


def run(command: str, *arguments: str, folder: Path) -> str:
    """Run a command of this virtual environment in a folder. Return what it printed; fail if it failed."""
    done = subprocess.run(
        [Path(sys.executable).with_name(command), *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, f"{command} ended with the status {done.returncode}:\n{done.stdout[-4000:]}"
    return done.stdout


def only_file(folder: Path, pattern: str) -> Path:
    """Return the one file below a folder whose name matches."""
    found = [*folder.rglob(pattern)]
    assert len(found) == 1, f"{pattern} matches {found}"
    return found[0]
