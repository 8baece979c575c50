"""The recorder counts what a GPU would launch, and nothing else."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from bench_gpu.without_gpu.recorder import H100, recording


def test_views_and_allocations_are_not_launches_and_everything_else_is() -> None:
    with recording(H100) as recorder, torch.inference_mode():
        x = torch.empty(4, 8, dtype=torch.bfloat16)
        assert x[1:].t().reshape(24).shape == (24,)
        assert recorder.take() == Counter({"torch:clone": 1})
        assert x.float().dtype == torch.float32
        x.copy_(x + 1)
        assert recorder.take() == Counter({"torch:_to_copy": 1, "torch:add": 1, "torch:copy_": 1})
        assert torch.nn.functional.linear(x, torch.empty(16, 8, dtype=x.dtype)).shape == (4, 16)
        assert recorder.take() == Counter({"library:mm": 1})
        assert x[:2].view(16).shape == (16,) and recorder.take() == Counter()


def test_reading_a_tensor_on_the_host_is_refused() -> None:
    with recording(H100), torch.inference_mode(), pytest.raises(RuntimeError, match="waits for the GPU"):
        torch.empty(3).max().item()
