"""A model as a user serves it: `penstock serve`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def served(model: Path, **settings: object) -> Iterator[str]:
    """The gateway's URL; settings of the node by their field names."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_NODE_")}
    command = [sys.executable, "-m", "penstock", "serve", str(model), "--port", "0"]
    env = clean | {f"PENSTOCK_NODE_{name.upper()}": str(value) for name, value in settings.items()}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            lines = iter(process.stdout)
            yield next(match[1] for line in lines if (match := re.search(r"at (http://\S+)/v1", line)))
        finally:
            process.terminate()
