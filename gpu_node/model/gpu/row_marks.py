"""What some rows' sampling looks at beside their logits: tokens seen and banned, biases, and masks."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from penstock.gpu_node.model.gpu.inputs import Ints
from penstock.gpu_node.model.protocol import SamplingRows
from penstock.kernels.triton.sampler import Marks, mark_entries


class RowMarks:
    """Keeps the sampler's marks, of which each such row of a step gets a row."""

    def __init__(self, max_rows: int, vocab: int, device: torch.device) -> None:
        self.marks = Marks.empty(max_rows, vocab, device)

    def places(self, rows: SamplingRows) -> Ints:
        """Each row's row of marks, [num_samples]; -1 for those that look at their logits alone."""
        lists = zip(rows.seen, rows.banned, strict=True)
        looks = np.array([bool(len(seen) or len(banned)) for seen, banned in lists], dtype=bool)
        if rows.biased:
            looks |= np.array(list(map(len, rows.biased))) > 0
        if rows.masks is not None:
            looks |= rows.masks.rows >= 0
        return np.where(looks, np.cumsum(looks) - 1, -1).astype(np.int32)

    def write(self, rows: SamplingRows, places: Ints) -> None:
        """Say what the rows that have a place look at; waits for masks that are still being written."""
        looking = np.flatnonzero(places >= 0).tolist()
        if not looking:
            return
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

    def _sent(self, array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Tensor:
        return torch.from_numpy(array).to(self.marks.marks.device)
