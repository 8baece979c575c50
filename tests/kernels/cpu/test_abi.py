"""The structs of Python are compared with those of the compiled library when it is loaded."""

from __future__ import annotations

import ctypes as c
from pathlib import Path

import pytest
from fakes import single_kernels
from fakes.native import ISAS, built

from penstock.kernels.cpu import library
from penstock.kernels.cpu.structs import AbiError, NativePlan, NativeSpec


@pytest.fixture(params=ISAS)
def path(request: pytest.FixtureRequest) -> Path:
    """The library for each instruction set that this CPU has."""
    return built(request.param)


class LongerSpec(NativeSpec):
    """With a field that the library does not know."""

    _fields_ = [("more", c.c_int32)]  # noqa: RUF012


class ShorterPlan(c.Structure):
    """Without the last field."""

    _fields_ = tuple(NativePlan._fields_[:-1])


class LongerRule(single_kernels._Rule):
    """With a field that the library does not know."""

    _fields_ = [("more", c.c_int32), ("still_more", c.c_int32)]  # noqa: RUF012


def test_libraries_whose_structs_agree_are_opened(path: Path) -> None:
    library.open_library(path)
    single_kernels.Single(path)


@pytest.mark.parametrize(("name", "struct"), [("NativeSpec", LongerSpec), ("NativePlan", ShorterPlan)])
def test_a_struct_of_another_size_is_refused_by_name(
    path: Path, monkeypatch: pytest.MonkeyPatch, name: str, struct: type[c.Structure]
) -> None:
    monkeypatch.setattr(library, name, struct)
    with pytest.raises(AbiError, match=f"{struct.__name__} has {c.sizeof(struct)} bytes"):
        library.open_library(path)


def test_the_single_kernels_refuse_another_rule(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(single_kernels, "_Rule", LongerRule)
    with pytest.raises(AbiError, match="LongerRule"):
        single_kernels.Single(path)
