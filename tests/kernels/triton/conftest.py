"""Where the Triton kernels run: on the GPU, or by the interpreter on the CPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Triton reads it when it is first imported. The root's conftest.py sets it too, but is not read on a bare GPU machine.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch
from fixtures import interpreter

HAS_CARD = torch.cuda.is_available()
TOLERANCES = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
"""Of values around 1, absolute and relative."""

if not HAS_CARD:
    interpreter.mend()


@pytest.fixture(scope="module", autouse=True)
def poisoned() -> Iterator[None]:
    """New memory is full of NaN and -1: an output that a kernel does not write shows."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("empty", "empty_like"):
            patch.setattr(torch, name, _poisoned(getattr(torch, name)))
        yield


def _poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def made(*args: Any, **options: Any) -> torch.Tensor:
        tensor = make(*args, **options)
        if tensor.numel() and not tensor.is_meta:
            whole = torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)
            whole.view(torch.uint8).fill_(255)
        return tensor

    return made


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU, or the CPU for the interpreter."""
    return torch.device("cuda" if HAS_CARD else "cpu")


@pytest.fixture(params=list(TOLERANCES), ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """What a kernel's inputs are."""
    chosen: torch.dtype = request.param
    return chosen
