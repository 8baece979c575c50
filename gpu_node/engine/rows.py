"""The batch as arrays: one row per running sequence, kept from step to step."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.gpu_node.engine.sequence import Sequence
from penstock.gpu_node.model.protocol import NULL_BLOCK, SamplingRows, StepPlan


class RowTable:
    """Block tables and sampling settings of the running sequences, so that a plan is gathered and not rebuilt."""

    def __init__(self, max_rows: int, max_blocks: int) -> None:
        self._unused = list(range(max_rows - 1, -1, -1))
        self._block_tables = np.full((max_rows, max_blocks), NULL_BLOCK, dtype=np.int32)
        self._temperature = np.zeros(max_rows, dtype=np.float32)
        self._top_k = np.zeros(max_rows, dtype=np.int32)
        self._top_p = np.ones(max_rows, dtype=np.float32)
        self._repetition_penalty = np.ones(max_rows, dtype=np.float32)
        self._seed = np.zeros(max_rows, dtype=np.uint64)
        self._choice = np.zeros(max_rows, dtype=np.int32)

    @property
    def num_unused(self) -> int:
        """Rows that another sequence could take."""
        return len(self._unused)

    def take(self, seq: Sequence) -> None:
        """Give a sequence a row."""
        row = seq.row = self._unused.pop()
        params = seq.params
        self._temperature[row] = params.temperature
        self._top_k[row] = max(params.top_k, 0)
        self._top_p[row] = params.top_p
        self._repetition_penalty[row] = params.repetition_penalty
        self._seed[row] = seq.seed
        self._choice[row] = seq.choice

    def give_back(self, seq: Sequence) -> None:
        """Take a sequence's row away."""
        self._block_tables[seq.row] = NULL_BLOCK
        self._unused.append(seq.row)
        seq.row = -1

    def add_blocks(self, seq: Sequence, blocks: list[int]) -> None:
        """Append blocks to a running sequence."""
        held = len(seq.blocks)
        self._block_tables[seq.row, held : held + len(blocks)] = blocks
        seq.blocks += blocks

    def plan(self, seqs: list[Sequence], counts: list[int]) -> StepPlan:
        """The step that computes the next counts[i] tokens of seqs[i]."""
        rows = np.array([seq.row for seq in seqs], dtype=np.int32)
        starts = np.array([seq.num_computed for seq in seqs], dtype=np.int32)
        ends = starts + np.array(counts, dtype=np.int32)
        query_starts = np.zeros(len(seqs) + 1, dtype=np.int32)
        np.cumsum(ends - starts, out=query_starts[1:])
        shift = np.repeat(starts - query_starts[:-1], ends - starts)
        samples = [i for i, seq in enumerate(seqs) if counts[i] == seq.num_uncomputed]
        return StepPlan(
            token_ids=np.concatenate(
                [seq.token_ids[start:end] for seq, start, end in zip(seqs, starts, ends, strict=True)]
            ),
            positions=np.arange(query_starts[-1], dtype=np.int32) + shift,
            query_starts=query_starts,
            context_lens=ends,
            block_tables=self._block_tables[rows, : max(len(seq.blocks) for seq in seqs)],
            sample_seqs=np.array(samples, dtype=np.int32),
            sampling=self._sampling_rows([seqs[i] for i in samples], rows[samples]),
        )

    def _sampling_rows(self, seqs: list[Sequence], rows: NDArray[np.int32]) -> SamplingRows:
        return SamplingRows(
            temperature=self._temperature[rows],
            top_k=self._top_k[rows],
            top_p=self._top_p[rows],
            repetition_penalty=self._repetition_penalty[rows],
            seed=self._seed[rows],
            choice=self._choice[rows],
            position=np.array([seq.num_output_tokens for seq in seqs], dtype=np.int32),
            seen=tuple(seq.penalised_ids for seq in seqs),
            banned=tuple(seq.banned_ids for seq in seqs),
        )
