"""Where the Triton kernels run: on the card, or by the interpreter on the CPU."""

from __future__ import annotations

import pytest
import torch
from fakes import interpreter

HAS_CARD = torch.cuda.is_available()
TOLERANCES = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
"""Of values around 1, absolute and relative."""

if not HAS_CARD:
    interpreter.mend()


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The card, or the CPU for the interpreter."""
    return torch.device("cuda" if HAS_CARD else "cpu")


@pytest.fixture(params=list(TOLERANCES), ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """What a kernel's inputs are."""
    chosen: torch.dtype = request.param
    return chosen
