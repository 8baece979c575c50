"""The embedding that engines without a model return: a known function of the prompt's tokens."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

from penstock.contract.errors import RequestError
from penstock.contract.tasks import Embed

FAKE_DIMENSIONS = 8


def fake_embedding(token_ids: Sequence[int], wanted: Embed) -> list[float]:
    """Return a vector of length 1: how often each remainder of eight is among the pooled tokens, plus one."""
    pooled = {"last": token_ids[-1:], "cls": token_ids[:1]}.get(wanted.pooling or "mean", token_ids)
    counts = [1.0 + sum(token % FAKE_DIMENSIONS == one for token in pooled) for one in range(FAKE_DIMENSIONS)]
    kept = counts[: wanted.dimensions]
    return [count / math.hypot(*kept) for count in kept]


def packed_fake_embedding(token_ids: Sequence[int], wanted: Embed) -> bytes:
    """Return the vector as an engine's output holds it."""
    if (wanted.dimensions or 0) > FAKE_DIMENSIONS:
        message = f"dimensions is {wanted.dimensions}, but this model's embeddings have {FAKE_DIMENSIONS}"
        raise RequestError(message, param="dimensions")
    vector = fake_embedding(token_ids, wanted)
    return struct.pack(f"<{len(vector)}f", *vector)
