"""What some rows' sampling looks at beside their logits: tokens seen and banned, biases, and masks."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from penstock.gpu_node.model.gpu.inputs import Ints
from penstock.gpu_node.model.protocol import SamplingRows
from penstock.kernels.triton.sampler import Marks, mark_entries, pack_rules
from penstock.kernels.triton.sending import sent

FIRST_ROWS = 8
"""Rows of marks that there is room for before anybody needs one; 8 bytes a token of the vocabulary each."""


class RowMarks:
    """Keeps the sampler's marks, as many rows as were ever needed: one for each of a step that looks at any."""

    def __init__(self, vocab: int, device: torch.device) -> None:
        self.marks = Marks.empty(FIRST_ROWS, vocab, device)

    def write(self, rows: SamplingRows, places: Ints) -> Tensor:
        """Say what rows that have a place look at, once their masks are written; the rules by which all rows choose."""
        looking = np.flatnonzero(places >= 0).tolist()
        self.make_room(len(looking))
        self.marks.clear(len(looking))
        entries = [
            mark_entries(place, rows.seen[i], int(rows.num_seen_prompt[i]), rows.banned[i])
            for place, i in enumerate(looking)
        ]
        self.marks.add(self._sent(np.concatenate(entries)))
        if rows.biased:
            owners = np.repeat(places[looking], [len(rows.biased[i]) for i in looking])
            biased, biases = (np.concatenate([lists[i] for i in looking]) for lists in (rows.biased, rows.biases))
            self.marks.biases[self._sent(owners), self._sent(biased)] = self._sent(biases)
        if rows.masks is not None:
            rows.masks.wait()
            masked = np.flatnonzero(rows.masks.rows >= 0)
            words = rows.masks.words[rows.masks.rows[masked]].view(np.int32)
            self.marks.allow_only(self._sent(places[masked]), self._sent(words))
        return self._sent(pack_rules(rows, places))

    def compile(self) -> None:
        """Compile what writes marks, by writing some that nobody looks at."""
        row, words = np.zeros(1, np.int32), np.zeros((1, -(-self.marks.marks.shape[1] // 32)), np.int32)
        self.marks.add(self._sent(np.zeros((1, 3), np.int32)))
        self.marks.allow_only(self._sent(row), self._sent(words))

    def make_room(self, num_rows: int) -> None:
        """Have as many rows of marks; what they hold is lost."""
        have, vocab = self.marks.marks.shape
        if num_rows > have:
            device = self.marks.marks.device
            self.marks = Marks.empty(1, 1, device)  # so that the old ones need not be there beside the new ones
            self.marks = Marks.empty(max(num_rows, 2 * have), vocab, device)

    def _sent(self, array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Tensor:
        return sent(array, self.marks.marks.device)


def places_of(rows: SamplingRows) -> Ints:
    """Each row's row of marks, [num_samples]; -1 for those that look at their logits alone."""
    lists = zip(rows.seen, rows.banned, strict=True)
    looks = np.array([bool(len(seen) or len(banned)) for seen, banned in lists], dtype=bool)
    if rows.biased:
        looks |= np.array(list(map(len, rows.biased))) > 0
    if rows.masks is not None:
        looks |= rows.masks.rows >= 0
    return np.where(looks, np.cumsum(looks) - 1, -1).astype(np.int32)
