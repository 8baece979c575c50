"""The sampler's marks for rows that depend on more than their logits: seen and banned tokens, biases and masks."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from penstock.gpu_node.model.gpu.inputs import Ints
from penstock.gpu_node.model.protocol import SamplingRows
from penstock.kernels.triton.sampler import Marks, mark_entries, pack_rules
from penstock.kernels.triton.sending import to_device_async

FIRST_ROWS = 8
"""Rows of marks allocated at start. A row takes 8 bytes per token of the vocabulary."""


class RowMarks:
    """Holds the sampler's marks: one row per sampling row that needs marks. Grows to the largest step so far."""

    def __init__(self, vocab: int, device: torch.device) -> None:
        self.marks = Marks.empty(FIRST_ROWS, vocab, device)

    def write(self, rows: SamplingRows, mark_rows: Ints) -> Tensor:
        """Wait for the masks, write the marks, and return the sampling rules of all rows.

        mark_rows: [num_samples], from `mark_rows_of`.
        """
        marked = np.flatnonzero(mark_rows >= 0).tolist()
        self.reserve(len(marked))
        self.marks.clear(len(marked))
        entries = [
            mark_entries(mark_row, rows.seen[i], int(rows.num_seen_prompt[i]), rows.banned[i])
            for mark_row, i in enumerate(marked)
        ]
        self.marks.add(self._sent(np.concatenate(entries)))
        if rows.biased:
            owners = np.repeat(mark_rows[marked], [len(rows.biased[i]) for i in marked])
            biased, biases = (np.concatenate([lists[i] for i in marked]) for lists in (rows.biased, rows.biases))
            self.marks.biases[self._sent(owners), self._sent(biased)] = self._sent(biases)
        if rows.masks is not None:
            rows.masks.wait()
            masked = np.flatnonzero(rows.masks.rows >= 0)
            words = rows.masks.words[rows.masks.rows[masked]].view(np.int32)
            self.marks.allow_only(self._sent(mark_rows[masked]), self._sent(words))
        return self._sent(pack_rules(rows, mark_rows))

    def compile(self) -> None:
        """Compile the kernels that write marks by writing unused ones."""
        row, words = np.zeros(1, np.int32), np.zeros((1, -(-self.marks.marks.shape[1] // 32)), np.int32)
        self.marks.add(self._sent(np.zeros((1, 3), np.int32)))
        self.marks.allow_only(self._sent(row), self._sent(words))

    def reserve(self, num_rows: int) -> None:
        """Allocate at least `num_rows` rows of marks; growing discards their contents."""
        have, vocab = self.marks.marks.shape
        if num_rows > have:
            device = self.marks.marks.device
            self.marks = Marks.empty(1, 1, device)  # free the old marks before allocating new ones
            self.marks = Marks.empty(max(num_rows, 2 * have), vocab, device)

    def _sent(self, array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Tensor:
        return to_device_async(array, self.marks.marks.device)


def mark_rows_of(rows: SamplingRows) -> Ints:
    """Return the row of marks of each sampling row, [num_samples]; -1 for rows that depend only on their logits."""
    has_marks = np.zeros(len(rows.seen), dtype=bool)
    for arrays in (rows.seen, rows.banned, rows.biased):
        if any(map(len, arrays)):
            has_marks |= np.fromiter(map(len, arrays), np.int64, len(arrays)) > 0
    if rows.masks is not None:
        has_marks |= rows.masks.rows >= 0
    return np.where(has_marks, np.cumsum(has_marks) - 1, -1).astype(np.int32)
