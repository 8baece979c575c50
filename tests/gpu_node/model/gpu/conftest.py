"""The GPU runner, on a GPU if there is one, else on the CPU by Triton's interpreter.

On a GPU machine only torch, triton, numpy and pytest may be installed. There, the tests that read checkpoints or run an
engine are not collected; `test_bare_*.py` and the tests of single modules are.
"""

from __future__ import annotations

import os
from pathlib import Path

# Triton reads it when it is first imported.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch
from bench_gpu.suite import left_out
from fixtures import interpreter

from penstock.gpu_node.model.gpu.device import Device

if not torch.cuda.is_available():
    interpreter.mend()

collect_ignore = list(left_out())


def pytest_report_header(config: pytest.Config) -> str | None:
    """Say what is left out."""
    names = ", ".join(collect_ignore)
    return f"packages are absent, so these files, which need checkpoints, are left out: {names}" if names else None


@pytest.fixture(scope="session")
def device() -> Device:
    """The GPU, or the CPU for the interpreter."""
    return Device(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
