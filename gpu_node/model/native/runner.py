"""Steps of a plan on the native kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.gpu_node.model.protocol import SamplingRows, StepPlan, StepResult
from penstock.kernels.cpu.library import NativeModel, NativePlan


class NativeRunner:
    """Runs each step on the model's own threads; `submit` only starts them."""

    def __init__(self, model: NativeModel, *, num_blocks: int, vocab_size: int) -> None:
        """`num_blocks` includes the null block."""
        self._model = model
        self._num_blocks = num_blocks
        self._vocab_size = vocab_size

    @property
    def num_blocks(self) -> int:
        """Blocks of the KV cache, the null block included."""
        return self._num_blocks

    def submit(self, plan: StepPlan) -> _Flight:
        """Start a step."""
        tokens, times_ms = np.empty(len(plan.sample_seqs), dtype=np.int32), np.zeros(2, dtype=np.float32)
        arrays = _addresses(plan) | {"tokens": _address(tokens), "times_ms": _address(times_ms)}
        ragged = _ragged(plan.sampling)
        native = NativePlan(**_counts(plan), **arrays, **{name: _address(table) for name, table in ragged.items()})
        self._model.start(native)
        return _Flight(self._model, plan, ragged, tokens, times_ms)

    def logits(self, plan: StepPlan) -> NDArray[np.float32]:
        """Run a step that samples nothing; the logits after each of its tokens, [num_tokens, vocab]."""
        logits = np.empty((len(plan.token_ids), self._vocab_size), dtype=np.float32)
        times_ms = np.zeros(2, dtype=np.float32)
        arrays = _addresses(plan) | {"logits": _address(logits), "times_ms": _address(times_ms)}
        self._model.start(NativePlan(**_counts(plan), **arrays))
        self._model.wait()
        return logits

    def zero_blocks(self, block_ids: Sequence[int]) -> None:
        """Clear blocks in every layer."""
        self._model.clear_blocks(block_ids)

    def close(self) -> None:
        """End the threads and free the memory."""
        self._model.close()


class _Flight:
    """A step on its way; keeps alive what the kernels read."""

    def __init__(self, model: NativeModel, *arrays: Any) -> None:
        self._model = model
        self._arrays = arrays

    def result(self) -> StepResult:
        self._model.wait()
        tokens, times_ms = self._arrays[-2:]
        return StepResult(tokens, *times_ms.tolist())


def _counts(plan: StepPlan) -> dict[str, int]:
    return {
        "num_tokens": len(plan.token_ids),
        "num_seqs": len(plan.context_lens),
        "num_samples": len(plan.sample_seqs),
        "block_table_stride": plan.block_tables.strides[0] // plan.block_tables.itemsize,
    }


def _addresses(plan: StepPlan) -> dict[str, int]:
    arrays = (plan.token_ids, plan.positions, plan.query_starts, plan.block_tables, plan.sample_seqs)
    names = ("token_ids", "positions", "query_starts", "block_tables", "sample_seqs")
    found = dict(zip(names, map(_address, arrays), strict=True))
    for name in _SAMPLING_COLUMNS:
        found[name] = _address(getattr(plan.sampling, name))
    return found


_SAMPLING_COLUMNS = (
    *("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("top_k", "choice", "position", "seed"),
)


def _ragged(rows: SamplingRows) -> dict[str, NDArray[Any]]:
    """The rows' lists of tokens as tables of addresses and lengths; nothing where all are empty."""
    found: dict[str, NDArray[Any]] = {}
    if any(map(len, rows.seen)):
        found |= _table("seen", rows.seen) | {"num_seen_prompt": rows.num_seen_prompt}
    if any(map(len, rows.banned)):
        found |= _table("banned", rows.banned)
    return found


def _table(name: str, lists: Sequence[NDArray[np.int32]]) -> dict[str, NDArray[Any]]:
    return {
        name: np.array([_address(ids) for ids in lists], dtype=np.uint64),
        f"num_{name}": np.array([len(ids) for ids in lists], dtype=np.int32),
    }


def _address(array: NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
