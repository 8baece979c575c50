"""Turns: where a step has too few tokens for all sequences, the one that has waited the longest goes first."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from penstock.gpu_node.engine.scheduler.running import RunningBatch
from penstock.gpu_node.engine.sequence import Sequence
from penstock.gpu_node.engine.steps import Ints, Step


class StepTurns:
    """The number of the last step in which each of some sequences had its turn."""

    def __init__(self) -> None:
        self._last: dict[Sequence, int] = {}
        self._num_steps = 0

    def begin_step(self, seqs: Iterable[Sequence]) -> list[Sequence]:
        """Return the sequences of the next step, the one that has waited the longest first.

        A new one goes before those that had their turn in the last step, and behind those that have waited longer. So
        new ones, however many come, delay none for ever.
        """
        self._last = {seq: self._last.get(seq, self._num_steps - 1) for seq in seqs}
        self._num_steps += 1
        return sorted(self._last, key=self._last.__getitem__)

    def note(self, seq: Sequence) -> None:
        """Count the turn of a sequence in the step."""
        self._last[seq] = self._num_steps

    def forget(self) -> None:
        """Let no sequence go before another: a step had tokens for all."""
        self._last.clear()


class RequestTurns:
    """Orders the running sequences so that a step's tokens are dealt to them in turns, whichever tenant they belong to.

    Sequences that decode stay in front while the step has tokens for all of them. Prompts share the rest: each gets all
    that is left in its turn.
    """

    def __init__(self, batch: RunningBatch) -> None:
        self._batch = batch
        self._turns = StepTurns()
        self._lacking: dict[Sequence, int] = {}
        """The tokens that each sequence lacks which waits for its turn."""

    def is_short(self, num_tokens: int, *, only_foreground: bool) -> bool:
        """Return whether a step of at most `num_tokens` tokens, drafted ones included, has too few for the running."""
        lacking, takes_part = self._lacking_tokens(only_foreground=only_foreground)
        return int(lacking[takes_part].sum()) > num_tokens

    def arrange(self, num_tokens: int, *, only_foreground: bool) -> None:
        """Order the sequences for a step of at most `num_tokens` tokens."""
        batch, table, rows = self._batch, self._batch.table, self._batch.rows
        lacking, takes_part = self._lacking_tokens(only_foreground=only_foreground)
        self._lacking.clear()
        if int(lacking[takes_part].sum()) <= num_tokens:
            self._turns.forget()
            return
        is_decoding = takes_part & (lacking == 1)
        if int((is_decoding * (1 + table.num_drafted[rows])).sum()) < num_tokens:
            takes_part &= ~is_decoding
        indices = takes_part.nonzero()[0].tolist()
        self._lacking = {batch.seqs[i]: int(lacking[i]) for i in indices}
        batch.put_last(self._turns.begin_step(self._lacking))

    def note(self, step: Step) -> None:
        """Count the turns in the step that was arranged last.

        A prompt that got only a small rest of the step keeps its place, so it goes first in the next one.
        """
        counts = (step.ends - step.starts).tolist()
        dealt = {seq: count for seq, count in zip(step.seqs, counts, strict=True) if count > 1 or seq in self._lacking}
        half = sum(dealt.values()) / 2
        for seq, count in dealt.items():
            if count and count >= min(half, self._lacking.get(seq, half)):
                self._turns.note(seq)

    def _lacking_tokens(self, *, only_foreground: bool) -> tuple[Ints, NDArray[np.bool_]]:
        """Return the tokens that each running sequence lacks, and which sequences share the step."""
        table, rows = self._batch.table, self._batch.rows
        lacking: Ints = table.num_tokens[rows] - table.num_computed[rows]
        takes_part = lacking > 0
        if only_foreground:
            takes_part &= ~table.is_background[rows]
        return lacking, takes_part
