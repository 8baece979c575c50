"""Triton's sampler chooses what the reference chooses, for any rows. Needs Hypothesis, which a GPU machine may lack."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("hypothesis")

from fixtures.sampling import SamplingCase
from fixtures.sampling_cases import sampling_cases
from hypothesis import given, settings

from .test_sampler import sampled_tokens


@settings(max_examples=4, deadline=None)
@given(case=sampling_cases(max_kinds=1))
def test_tokens_equal_those_of_the_reference(case: SamplingCase, device: torch.device) -> None:
    assert case.disagreements(sampled_tokens(case, device)) == []
