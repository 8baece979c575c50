"""What CUDA streams and graphs require of the code that uses them."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.gpu_node.model.gpu.device import Device


def test_no_garbage_is_collected_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Freeing page-locked memory waits for the GPU, which is forbidden there. The test replaces the GPU's functions."""
    graph: Any = SimpleNamespace(replay=lambda: None, pool=lambda: 7)
    for name, value in {"synchronize": None, "CUDAGraph": graph, "graph": nullcontext()}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value, **__: value)
    device = Device(torch.device("cpu"))
    device.is_gpu = True
    is_collecting: list[bool] = []
    assert device.capture(lambda: is_collecting.append(gc.isenabled()), None) == (graph.replay, 7)
    assert is_collecting == [True, False]
    assert gc.isenabled()
