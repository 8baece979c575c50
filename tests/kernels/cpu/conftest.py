"""The native kernels, once for each instruction set."""

from __future__ import annotations

import pytest
from fakes.native import ISAS, built
from fakes.single_kernels import Single


@pytest.fixture(scope="session", params=ISAS)
def kernels(request: pytest.FixtureRequest) -> Single:
    """The kernels compiled for one instruction set that this CPU has."""
    return Single(built(request.param))
