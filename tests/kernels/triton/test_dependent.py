"""Which launches are dependent: those within the context, on a GPU that supports it."""

from __future__ import annotations

import pytest
import torch
import triton

from penstock.kernels.triton import launches
from penstock.kernels.triton.launches import dependent_launch, dependent_launches

DEVICE, OFF, ON = torch.device("cuda", 0), {"DEPENDENT": False}, {"DEPENDENT": True, "launch_pdl": True}


@pytest.fixture(autouse=True)
def compiled_for_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an H100, without the interpreter."""
    monkeypatch.setattr(launches, "architecture", lambda _: 90)
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)


def test_launches_are_dependent_within_the_context_only() -> None:
    assert dependent_launch(DEVICE) == OFF
    with dependent_launches():
        assert dependent_launch(DEVICE) == ON
        with dependent_launches(enabled=False):
            assert dependent_launch(DEVICE) == OFF
        assert dependent_launch(DEVICE) == ON
    assert dependent_launch(DEVICE) == OFF


def test_launches_are_not_dependent_before_hopper_nor_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    with dependent_launches():
        monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
        assert dependent_launch(DEVICE) == OFF
        monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
        monkeypatch.setattr(launches, "architecture", lambda _: 89)
        assert dependent_launch(DEVICE) == OFF
