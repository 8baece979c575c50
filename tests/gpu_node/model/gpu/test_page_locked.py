"""Page-locked memory: no more than is asked for, registered until its last view is gone, and only then unmapped."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.gpu.device import Device, check_host_address, page_locked

PAGE = 4096


class Card:
    """The part of CUDA's runtime that registers memory; `unregistered` are bytes that were there when it happened."""

    def __init__(self) -> None:
        self.code = 0
        self.known: dict[int, int] = {}
        self.events: list[str] = []

    def register(self, address: int, num_bytes: int, flags: int) -> int:
        if not self.code:
            self.known[address] = num_bytes
        return self.code

    def unregister(self, address: int) -> int:
        num_bytes = self.known.pop(address)
        with open("/proc/self/maps") as maps:
            spans = [[int(end, 16) for end in line.split()[0].split("-")] for line in maps]
        is_mapped = any(first <= address and address + num_bytes <= last for first, last in spans)
        self.events.append("unregistered while mapped" if is_mapped else "unregistered too late")
        return 0


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    card = Card()
    runtime = SimpleNamespace(cudaHostRegister=card.register, cudaHostUnregister=card.unregister)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: card.events.append("waited"))
    return card


def test_memory_is_registered_exactly_until_its_last_view_is_gone(card: Card) -> None:
    num_bytes = 5 * PAGE + 16
    tensor = page_locked(num_bytes, torch.device("cpu"))
    assert card.known == {tensor.data_ptr(): num_bytes}
    assert tensor.data_ptr() % PAGE == 0
    assert not tensor.any()
    view = tensor.view(torch.int32)[4:]
    view[0] = 7
    assert tensor[16] == 7
    del tensor
    assert card.known
    assert view[0] == 7
    del view
    assert not card.known
    assert card.events == ["waited", "unregistered while mapped"]


def test_failed_registration_is_an_error_and_releases_nothing(card: Card) -> None:
    card.code = 2
    with pytest.raises(MemoryError, match="failed with 2"):
        page_locked(PAGE, torch.device("cpu"))
    assert not card.events


@pytest.mark.parametrize(
    ("code", "shift", "message"), [(0, 0, None), (0, 4096, "address .* instead of"), (801, 0, "error 801")]
)
def test_memory_that_the_gpu_sees_elsewhere_is_refused(
    code: int, shift: int, message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def address_of(found: Any, pointer: Any, _flags: int) -> int:
        found._obj.value = pointer.value + shift
        return code

    driver = SimpleNamespace(cuMemHostGetDevicePointer_v2=address_of)
    monkeypatch.setattr("penstock.gpu_node.model.gpu.device.ctypes.CDLL", lambda _: driver)
    memory, device = torch.zeros(4), torch.device("cpu")
    if message is None:
        check_host_address(memory, device)
        return
    with pytest.raises(ConfigError, match=f"{message}.*swap_space_gib"):
        check_host_address(memory, device)


@pytest.mark.parametrize("shape", [(0, 48), (3, 48)])
def test_a_device_gives_zeros_of_the_shape(shape: tuple[int, int]) -> None:
    device = Device(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    tensor = device.pinned_run(*shape, dtype=torch.int16)
    assert (tensor.shape, tensor.dtype, bool(tensor.any())) == (shape, torch.int16, False)
    assert tensor.is_pinned() == (device.is_gpu and bool(len(tensor)))
