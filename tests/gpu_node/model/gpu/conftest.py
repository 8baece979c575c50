"""The GPU runner, on a GPU if there is one, else on the CPU by Triton's interpreter.

On a GPU machine only torch, triton, numpy and pytest may be installed. There, the tests that read checkpoints or run an
engine are not collected; `test_bare_runner.py` and the tests of single modules are.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

# Triton reads it when it is first imported.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch
from fakes import interpreter

if not torch.cuda.is_available():
    interpreter.mend()

_NEED_CHECKPOINTS = ("adapters", "load", "offload", "runner", "stale_blocks", "stored")
_ABSENT = [name for name in ("pydantic", "gguf", "safetensors", "transformers", "redis") if find_spec(name) is None]
collect_ignore = [f"test_{name}.py" for name in _NEED_CHECKPOINTS] if _ABSENT else []


def pytest_report_header(config: pytest.Config) -> str | None:
    """Say what is left out, and why."""
    if not _ABSENT:
        return None
    return f"without {', '.join(_ABSENT)}, the tests of checkpoints are left out: {', '.join(_NEED_CHECKPOINTS)}"
