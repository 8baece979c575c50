"""A token for which a torch runner's logits are NaN."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from penstock.gpu_node.model.gpu.linear import EmbeddingTable


def _with_nan(table: EmbeddingTable, token_id: int) -> EmbeddingTable:
    weight = table.weight.clone()
    weight[token_id] = torch.nan
    return EmbeddingTable(weight)


@contextmanager
def poisoned(runner: Any, token_id: int) -> Iterator[None]:
    """Set the token's embedding to NaN while the block runs."""
    decoder = runner._decoder
    kept = decoder._weights

    def rows(ids: Tensor) -> Tensor:
        found: Tensor = kept.embedding(ids).clone()
        found[ids == token_id] = torch.nan
        return found

    is_table = isinstance(kept.embedding, EmbeddingTable)
    decoder._weights = replace(kept, embedding=_with_nan(kept.embedding, token_id) if is_table else rows)
    try:
        yield
    finally:
        decoder._weights = kept
