"""Logprobs of rows do not depend on the rows beside them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from penstock.gpu_node.model.torch_common.sampler import logprobs_of


@pytest.fixture
def two_threads() -> Iterator[None]:
    """With more than one thread, torch cuts the sum of a row that is alone into parts, as a GPU does."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_logprobs_are_those_of_torch() -> None:
    torch.manual_seed(0)
    logits = 5 * torch.randn(3, 1000)
    logits[1, 7] = -torch.inf
    logits[2] = -torch.inf
    tokens = torch.tensor([5, 7, -1])
    _, values = logprobs_of(logits, tokens, np.full(3, 2, np.int32))
    want = logits.double().log_softmax(-1)
    torch.testing.assert_close(values[0, 0], want[0, 5].float(), rtol=0, atol=2e-6)
    torch.testing.assert_close(values[:2, 1:], want[:2].topk(2).values.float(), rtol=0, atol=2e-6)
    assert values[1, 0] == -torch.inf
    assert values[2].isnan().all(), "a row without a token"


@pytest.mark.usefixtures("two_threads")
def test_a_row_alone_has_the_same_bits_as_in_a_batch() -> None:
    torch.manual_seed(0)
    logits = torch.randn(70, 40_000)
    # Sums near 0.5, where a float32 shows more of their bits than near 11.
    logits += 0.5 - logits.logsumexp(-1, keepdim=True)
    tokens, wanted = torch.arange(70), np.full(70, 3, np.int32)
    ids, values = logprobs_of(logits, tokens, wanted)
    for row in range(70):
        one = slice(row, row + 1)
        own_ids, own = logprobs_of(logits[one], tokens[one], wanted[one])
        assert torch.equal(own, values[one])
        assert torch.equal(own_ids, ids[one])
