"""The GPUs that a process may use, from what the driver's tool prints and from CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.contract.errors import ConfigError
from penstock.gpu_node.gpus import VISIBLE, GpuDevice, devices_here, visible_devices

FIRST, SECOND = "GPU-11111111-2222-3333-4444-555555555555", "GPU-11119999-2222-3333-4444-555555555555"
MIGS = "MIG-aaaaaaaa-2222-3333-4444-555555555555", "MIG-bbbbbbbb-2222-3333-4444-555555555555"
TWO = f"GPU 0: NVIDIA H100 80GB HBM3 (UUID: {FIRST})\nGPU 1: NVIDIA H100 80GB HBM3 (UUID: {SECOND})\n"
CUT = TWO + f"  MIG 1g.10gb     Device  0: (UUID: {MIGS[0]})\n  MIG 3g.40gb     Device  1: (UUID: {MIGS[1]})\n"
SIZES = 81_559, 81_559


def tokens(listing: str, variable: str | None) -> list[str]:
    return [device.token for device in visible_devices(listing, SIZES, variable)]


def test_without_the_variable_each_gpu_or_each_mig_instance_is_a_device() -> None:
    assert tokens(TWO, None) == [FIRST, SECOND]
    assert visible_devices(CUT, SIZES, None) == (
        GpuDevice(FIRST, "NVIDIA H100 80GB HBM3", 81_559),
        GpuDevice(MIGS[0], "NVIDIA H100 80GB HBM3 MIG 1g.10gb", 10_240),
        GpuDevice(MIGS[1], "NVIDIA H100 80GB HBM3 MIG 3g.40gb", 40_960),
    )


@pytest.mark.parametrize(
    ("variable", "found"),
    [
        ("1", ["1"]),
        ("1,0", ["1", "0"]),
        (f"{SECOND}, 0", [SECOND, "0"]),
        ("GPU-11119", ["GPU-11119"]),
        (MIGS[1], [MIGS[1]]),
        (f"MIG-{SECOND}/1/0", [f"MIG-{SECOND}/1/0"]),
        ("", []),
        ("-1", []),
        ("void", []),
    ],
)
def test_the_variable_chooses_devices_and_keeps_its_words(variable: str, found: list[str]) -> None:
    assert tokens(CUT, variable) == found


@pytest.mark.parametrize(
    ("variable", "reason"),
    [
        ("2", "names '2', but this machine has the GPUs 0 to 1"),
        ("0,7", "names '7'"),
        ("0,0", "names a GPU twice"),
        ("GPU-1111", "names 'GPU-1111'"),
        ("MIG-cccc", "names 'MIG-cccc'"),
        ("cuda:0", "names 'cuda:0'"),
    ],
)
def test_a_device_that_is_not_there_is_named(variable: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as refused:
        visible_devices(CUT, SIZES, variable)
    assert refused.value.param == VISIBLE


def test_the_driver_of_this_machine_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for nvidia-smi prints what the real one prints for two H100."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f'#!/bin/sh\nif [ "$1" = -L ]; then printf "{TWO}"; else printf "81559\\n[N/A]\\n"; fi\n')
    tool.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv(VISIBLE, raising=False)
    assert [(device.token, device.total_mib) for device in devices_here()] == [(FIRST, 81_559), (SECOND, 0)]
    monkeypatch.setenv(VISIBLE, "1")
    assert [device.token for device in devices_here()] == ["1"]
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="this machine has no GPU"):
        devices_here()
