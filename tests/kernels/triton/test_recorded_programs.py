"""Programs that repeat recorded operations compute what their own Python would, whichever way they go."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from fixtures import recorded_programs

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU does not interpret")


@triton.jit  # type: ignore[untyped-decorator]
def _collatz(out, numbers, factor, offset, times: tl.constexpr):  # type: ignore[no-untyped-def]
    """Grid [numbers]: counts steps, and sums a run as long as that, by branches and loops that depend on numbers."""
    row = tl.program_id(0)
    number, steps = tl.load(numbers + row), 0
    while number > 1:
        if number % 2 == 0:
            number = number // 2
        else:
            number = 3 * number + 1
        steps += 1
    total = 0.0
    for i in range(steps):
        total += tl.sum((tl.arange(0, 4) + i).to(tl.float32) * factor, 0)
    tl.store(out + 2 * row, total + offset)
    # Its own store, read again.
    tl.store(out + 2 * row + 1, tl.load(out + 2 * row) * times)


def _want(number: int, factor: float, offset: int, times: int) -> list[float]:
    steps = 0
    while number > 1:
        number, steps = number // 2 if number % 2 == 0 else 3 * number + 1, steps + 1
    total = sum(4 * i + 6 for i in range(steps)) * factor + offset
    return [total, total * times]


@pytest.mark.skipif(os.environ.get("HYPOTHESIS_PROFILE") == "full", reason="the full profile records no programs")
def test_each_recorded_program_follows_its_own_branches_and_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    recordings, record = [], recorded_programs._Launch._record

    def counted(launch: Any, *given: Any) -> None:
        recordings.append(launch.__name__)
        record(launch, *given)

    monkeypatch.setattr(recorded_programs._Launch, "_record", counted)
    torch.manual_seed(0)
    for factor, offset, times in ((0.5, 3, 2), (0.5, 70, 2), (0.25, 3, 2), (0.5, 3, 4)):
        for count in (1, 20):
            numbers = torch.randint(1, 6, (count,), dtype=torch.int32)
            out = torch.empty(count, 2)
            _collatz[(count,)](out, numbers, factor, offset, times=times)
            assert out.tolist() == [_want(number, factor, offset, times) for number in numbers.tolist()]
    # Five numbers have five ways, and three pairs of constants a tree each: 84 programs ran.
    assert 3 <= len(recordings) <= 15


@triton.jit  # type: ignore[untyped-decorator]
def _every_axis(out, counter, x, size: tl.constexpr):  # type: ignore[no-untyped-def]
    """Grid [rows, 2]: operations that have a rule of their own for many programs, on x: [rows, size, size]."""
    row, half = tl.program_id(0), tl.program_id(1)
    i = tl.arange(0, size)
    at = (row * size + i)[:, None] * size + i[None, :]
    block = tl.load(x + at, mask=(i < size - half)[:, None] & (i < size)[None, :], other=0.5)
    first = tl.load(x + row * size * size)
    sums, most, best = tl.sum(block, 0), tl.max(block, 1), tl.argmax(block, 1)
    running, total = tl.cumsum(block, 1), tl.sum(tl.sum(block, 1), 0)
    product = tl.dot(block, tl.trans(block), input_precision="ieee")
    left, right = tl.split(tl.reshape(running, (size, size // 2, 2)))
    places = tl.atomic_add(counter, 1)
    mixed = tl.exp(product * 0.01) + sums[None, :] + most[:, None] * best[:, None] + total + first
    mixed += tl.sum(left, 1)[:, None] - tl.sum(right, 1)[None, :] + places * 0
    mixed = tl.where(block > 0, mixed.to(tl.float16).to(tl.float32), mixed) + tl.num_programs(0)
    tl.store(out + half * tl.num_programs(0) * size * size + at, mixed, mask=block > -1.0)


@pytest.mark.parametrize("rows", [1, 3, 100])
def test_programs_that_run_together_compute_what_each_computes_alone(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime.interpreter import InterpreterBuilder

    x = torch.randn(rows, 8, 8, generator=torch.Generator().manual_seed(0))

    def computed() -> tuple[list[int], int]:
        out, counter = torch.zeros(2, rows, 8, 8), torch.zeros(1, dtype=torch.int32)
        _every_axis[(rows, 2)](out, counter, x, size=8)
        return out.view(torch.int32).flatten().tolist(), int(counter)

    together = [computed(), computed()]
    # With another method in the builder, each program runs by itself. It adds floats and integers alike.
    monkeypatch.setattr(InterpreterBuilder, "create_fadd", InterpreterBuilder.create_add)
    alone = computed()
    assert together == [alone, alone]
    assert alone[1] == 2 * rows
