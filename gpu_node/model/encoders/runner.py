"""The runner of encoders: a module of transformers on the CPU, over texts of about equal length at a time."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.protocol import Placement
from penstock.gpu_node.model.text_protocol import RowKind, TextBatch, TextResult
from penstock.gpu_node.model.torch_common.memory_errors import translate_out_of_memory
from penstock.kernels.cpu.probe import usable_cores

_MAX_PADDING = 1.06
"""Places of a group of texts, divided by its tokens."""
_FEW_PLACES = 256
"""Places of a group up to which more padding is cheaper than another pass."""
_LENGTHS = 13, 7
"""Tokens of the two texts that are compared when a module is loaded."""
_MAX_ERRORS = {torch.float32: 0.001, torch.float16: 0.05, torch.bfloat16: 0.15}
"""Relative errors of what a module computes for a text beside a longer one. If it mixes texts, they are about 1."""


class EncoderRunner:
    """Runs each step on a single worker thread. The texts of a step are sorted by length, so little is padded."""

    def __init__(self, module: nn.Module, row_kind: RowKind) -> None:
        self._module: Any = module
        self._row_kind = row_kind
        self._weight_bytes = sum(one.nbytes for one in module.parameters())
        config: Any = module.config
        pad = getattr(config, "pad_token_id", None)
        self._pad = pad if isinstance(pad, int) and pad >= 0 else 0
        names = inspect.signature(module.forward).parameters
        self._takes_types = "token_type_ids" in names and (getattr(config, "type_vocab_size", 0) or 0) > 1
        # Only this thread computes, because every thread that calls torch keeps its own team of OpenMP threads.
        self._thread = ThreadPoolExecutor(1, "penstock-torch")

    @property
    def placement(self) -> Placement:
        """On the CPU."""
        return Placement(self._weight_bytes, leaves_core_free=torch.get_num_threads() < usable_cores())

    def submit(self, batch: TextBatch) -> Future[TextResult]:
        """Start a step."""
        return self._thread.submit(self._step, batch)

    def require_agreement(self, vocab_size: int) -> None:
        """Compare what the module computes for a text beside a longer one with what it computes for it alone.

        Raises ConfigError if they differ: then the module attends to padding.
        """
        texts = [_sample(length, vocab_size, self._pad) for length in _LENGTHS]
        together = self.submit(_packed(texts)).result().hidden
        alone = np.concatenate([self.submit(_packed([text])).result().hidden for text in texts])
        size = max(float(np.linalg.norm(alone)), float(np.finfo(np.float32).tiny))
        error = float(np.linalg.norm(together - alone)) / size
        if not error <= _MAX_ERRORS[next(self._module.parameters()).dtype]:
            raise ConfigError(f"what it computes for a text depends on longer texts beside it (by {error:.2g})")

    @translate_out_of_memory()
    @torch.inference_mode()
    def _step(self, batch: TextBatch) -> TextResult:
        begun_s = time.perf_counter()
        lengths = np.diff(batch.starts)
        hidden: NDArray[np.float32] | None = None
        for texts in groups_of(lengths):
            found = self._compute(batch, texts, lengths[texts])
            if hidden is None:
                num_rows = len(lengths) if self._row_kind == "labels" else len(batch.token_ids)
                hidden = np.empty((num_rows, found.shape[-1]), np.float32)
            if self._row_kind == "labels":
                hidden[texts] = found
                continue
            for text, row in zip(texts, found, strict=True):
                start, end = batch.starts[text : text + 2]
                hidden[start:end] = row[: end - start]
        if hidden is None:
            hidden = np.empty((0, 0), np.float32)
        return TextResult(hidden, (time.perf_counter() - begun_s) * 1e3)

    def _compute(self, batch: TextBatch, texts: NDArray[np.int64], lengths: NDArray[np.int32]) -> NDArray[np.float32]:
        """Return the rows of some texts, [texts, longest, width], or [texts, labels]."""
        shape = len(texts), int(lengths.max())
        ids, types, mask = np.full(shape, self._pad, np.int64), np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        for row, (text, length) in enumerate(zip(texts, lengths, strict=True)):
            span = slice(batch.starts[text], batch.starts[text] + length)
            ids[row, :length], types[row, :length], mask[row, :length] = batch.token_ids[span], batch.types[span], 1
        given: dict[str, Tensor] = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}
        if self._takes_types:
            given["token_type_ids"] = torch.from_numpy(types)
        out = self._module(**given)
        rows: Tensor = out.last_hidden_state if self._row_kind == "vectors" else out.logits
        return rows.float().numpy()


def groups_of(lengths: NDArray[np.int32]) -> Iterator[NDArray[np.int64]]:
    """Yield the indices of texts that are computed together, the longest first: little of a group is padding."""
    order = np.argsort(-lengths, kind="stable")
    start = num_tokens = 0
    for at, text in enumerate(order):
        places = int(lengths[order[start]]) * (at + 1 - start)
        if at > start and places > max(_FEW_PLACES, _MAX_PADDING * (num_tokens + int(lengths[text]))):
            yield order[start:at]
            start, num_tokens = at, 0
        num_tokens += int(lengths[text])
    if len(order):
        yield order[start:]


def _sample(length: int, vocab_size: int, pad: int) -> list[int]:
    """Return the token ids of a text without a padding token."""
    ids = (5 + (at * 37 + 11 * length) % max(1, min(vocab_size, 1000) - 5) for at in range(length))
    return [one % vocab_size if one != pad else (one + 1) % vocab_size for one in ids]


def _packed(texts: list[list[int]]) -> TextBatch:
    ids = np.array([one for text in texts for one in text], np.int32)
    starts = np.cumsum([0, *map(len, texts)]).astype(np.int32)
    return TextBatch(ids, starts, np.zeros(len(ids), np.int32))
