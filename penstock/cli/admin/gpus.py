"""Detection of this machine's GPUs."""

from __future__ import annotations

import shutil
import subprocess

_NVIDIA_SMI_TIMEOUT_S = 20


def list_gpus() -> list[str]:
    """Return name and memory of each NVIDIA GPU that the driver reports. Without a driver the list is empty."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    command = [tool, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_NVIDIA_SMI_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]
