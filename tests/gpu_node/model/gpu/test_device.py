"""What a card's streams and graphs ask of whoever uses them."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.gpu_node.model.gpu.device import Device


def test_no_garbage_is_collected_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Page-locked memory that it finds waits for the card, which is forbidden there; so a card is made up."""
    graph: Any = SimpleNamespace(replay=lambda: None, pool=lambda: 7)
    for name, value in {"synchronize": None, "CUDAGraph": graph, "graph": nullcontext()}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value, **__: value)
    device = Device(torch.device("cpu"))
    device.is_gpu = True
    is_collecting: list[bool] = []
    assert device.capture(lambda: is_collecting.append(gc.isenabled()), None) == (graph.replay, 7)
    assert is_collecting == [True, False]
    assert gc.isenabled()
