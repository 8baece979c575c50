"""At the ends of each sampling option's range, alone and in pairs, scores stay finite and every sampler agrees."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fakes.single_kernels import Single
from fixtures.sampling import row_of
from fixtures.sampling_ranges import ALONE, PAIRS, case_of

from penstock.contract.sampling import SamplingParams
from penstock.kernels.reference.sampler import FAILED_TOKEN, sample_row


@pytest.mark.parametrize("options", [ALONE, PAIRS], ids=["alone", "in pairs"])
def test_no_end_of_a_range_overflows(kernels: Single, options: list[dict[str, Any]]) -> None:
    for chosen in options:
        case = case_of(chosen)
        tokens = np.array([kernels.sample_row(row, row_of(case.rows, i)) for i, row in enumerate(case.logits)])
        assert (tokens != FAILED_TOKEN).all(), chosen
        assert case.disagreements(tokens.astype(np.int32)) == [], chosen
        assert all(sample_row(row, row_of(case.rows, i)) != FAILED_TOKEN for i, row in enumerate(case.logits)), chosen


@pytest.mark.parametrize(("name", "value"), [("repetition_penalty", 0.00999), ("repetition_penalty", 1e-38)])
def test_a_value_below_its_range_is_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=r"greater than or equal to 0\.01"):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [1e-300, 1e-8, 9e-6])
def test_a_temperature_near_zero_is_greedy(value: float) -> None:
    assert SamplingParams(temperature=value).temperature == 0.0
