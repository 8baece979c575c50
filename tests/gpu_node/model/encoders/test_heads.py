"""The heads of encoders, against what torch and the definitions of sentence-transformers say."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.contract.tasks import Classify, Embed
from penstock.gpu_node.model.encoders.heads import DenseLayer, EmbeddingHead, LabelHead, PoolingMode, pooled

NAIVE = {
    "cls": lambda x: x[0],
    "last": lambda x: x[-1],
    "max": lambda x: x.max(axis=0),
    "mean": lambda x: x.mean(axis=0),
    "mean_sqrt_len": lambda x: x.sum(axis=0) / np.sqrt(len(x)),
    "weightedmean": lambda x: (x * np.arange(1, len(x) + 1)[:, None]).sum(axis=0) / np.arange(1, len(x) + 1).sum(),
}
ACTIVATIONS = {
    "Identity": torch.nn.Identity(),
    "Tanh": torch.nn.Tanh(),
    "ReLU": torch.nn.ReLU(),
    "GELU": torch.nn.GELU(),
    "Sigmoid": torch.nn.Sigmoid(),
}


def states(lengths: list[int], width: int = 6) -> np.ndarray:
    return np.random.default_rng(len(lengths)).standard_normal((sum(lengths), width)).astype(np.float32)


@pytest.mark.parametrize("mode", NAIVE)
@settings(max_examples=10, deadline=None)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_a_pooling_is_what_its_name_says_of_each_text(mode: PoolingMode, lengths: list[int]) -> None:
    hidden = states(lengths)
    found = pooled(hidden, np.array(lengths, np.int32), mode)
    parts = np.split(hidden, np.cumsum(lengths)[:-1])
    assert np.allclose(found, [NAIVE[mode](part) for part in parts], atol=1e-5)
    assert found.dtype == np.float32


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_dense_layer_is_that_of_torch(name: str) -> None:
    x, weight, bias = states([5]), states([4]), states([1], 4)[0]
    layer = DenseLayer(weight, bias, name.lower())  # type: ignore[arg-type]
    expected = ACTIVATIONS[name](torch.nn.functional.linear(*map(torch.from_numpy, (x, weight, bias))))
    assert np.allclose(layer(x), expected.numpy(), atol=1e-6)


def test_several_poolings_stand_one_after_another_and_normalization_is_an_option() -> None:
    hidden, lengths = states([3, 2]), np.array([3, 2], np.int32)
    plain = EmbeddingHead(("cls", "mean"), (), normalizes=False, width=12).rows(hidden, lengths, Embed())
    assert np.array_equal(plain, np.concatenate([pooled(hidden, lengths, mode) for mode in ("cls", "mean")], axis=1))
    normal = EmbeddingHead(("cls", "mean"), (), normalizes=True, width=12).rows(hidden, lengths, Embed(dimensions=5))
    assert np.allclose(np.linalg.norm(normal, axis=1), 1)
    assert normal.shape == (2, 5)


@pytest.mark.parametrize("is_multi_label", [False, True])
def test_labels_exclude_each_other_unless_the_model_says_otherwise(is_multi_label: bool) -> None:
    logits = 50 * states([4], 3)
    head = LabelHead(("a", "b", "c"), is_multi_label, "sigmoid")
    of_torch = torch.sigmoid if is_multi_label else lambda x: torch.softmax(x, dim=1)
    found = head.rows(logits, np.ones(4, np.int32), Classify())
    assert np.allclose(found, of_torch(torch.from_numpy(logits)).numpy(), atol=1e-6)
    assert head.kinds == ("classify",)
