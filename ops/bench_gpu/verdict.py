"""Whether a result is near enough to the reference."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


class WrongResultError(Exception):
    """A kernel or a step gave another result than its reference. A benchmark of it would mean nothing."""


@dataclass(frozen=True)
class Bound:
    """The error that rounding explains, as fractions of the reference."""

    rms: float
    """Root mean square of the differences, by that of the reference."""
    largest: float
    """Largest difference, by the largest number of the reference."""


EXACT = Bound(0.0, 0.0)
SHORT = Bound(0.004, 0.02)
"""One rounding to bfloat16 errs by at most 2^-9 of a number. Products round inputs, weights or shares as well."""

_FLOAT8 = Bound(0.04, 0.07)
_INT8_LARGEST = 1 / 254 + 2**-8
"""Half a step is 1 / 254 of a vector's largest number, which may have been rounded to bfloat16 before."""


def stored_bound(kept: torch.dtype, want: Tensor) -> Bound:
    """Return the error of vectors, [..., size], that are stored as `kept`, with a scale for each.

    Steps of int8 follow a vector's largest number, so their errors depend on the vectors. A fixed bound would fail for
    one draw of random numbers, and hide errors in another.
    """
    if kept != torch.int8:
        return _FLOAT8 if kept == torch.float8_e4m3fn else SHORT
    steps = want.double().abs().amax(-1) / 127
    # Rounding errs evenly by up to half a step.
    expected = (steps.square().mean() / 12 / want.double().square().mean()).sqrt()
    return Bound(1.25 * float(expected), _INT8_LARGEST)


def judge(name: str, got: Tensor, want: Tensor, bound: Bound) -> dict[str, float | str]:
    """Compare in float64; return the errors and their bounds. Raises WrongResultError beyond a bound, or for a NaN."""
    difference, exact = (got.double() - want.double()).abs(), want.double().abs().clamp(min=1e-30)
    rms, largest = (difference.square().mean() / exact.square().mean()).sqrt(), difference.max() / exact.max()
    found = Bound(float(rms), float(largest))
    # A NaN compares as false.
    if not (found.rms <= bound.rms and found.largest <= bound.largest):
        raise WrongResultError(
            f"{name}: rms error {found.rms:.2g} (bound {bound.rms:.2g}), "
            f"largest {found.largest:.2g} (bound {bound.largest:.2g})"
        )
    return {"check": name, "rms": found.rms, "rms_bound": bound.rms, "max": found.largest, "max_bound": bound.largest}


def judge_equal(name: str, got: Tensor, want: Tensor) -> dict[str, float | str]:
    """As `judge`, for results that must be equal to the last bit."""
    if not torch.equal(got, want):
        raise WrongResultError(f"{name}: {_difference(got, want)}")
    return {"check": name, "rms": 0.0, "rms_bound": 0.0, "max": 0.0, "max_bound": 0.0}


def _difference(got: Tensor, want: Tensor) -> str:
    """Return where two results first differ, and the largest difference."""
    if got.shape != want.shape:
        return f"the shapes {tuple(got.shape)} and {tuple(want.shape)} differ"
    # A NaN differs from all numbers.
    at = (got != want).nonzero()
    first = tuple(at[0].tolist())
    largest = (got.double() - want.double()).abs().max()
    return (
        f"{len(at)} of {got.numel()} numbers differ, first {got[first]} from {want[first]} at {first}, by {largest:.3g}"
    )
