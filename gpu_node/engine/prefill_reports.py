"""Progress reports of prompts, for the requests that ask for them."""

from __future__ import annotations

import time
from collections.abc import Container

from penstock.contract.output import PrefillProgress
from penstock.gpu_node.engine.in_flight import InFlightStep
from penstock.gpu_node.engine.records import StepOutput
from penstock.gpu_node.engine.sequence import Sequence


class PrefillReports:
    """Makes an output without tokens for each part of a watched prompt that a step has computed.

    A watched sequence is forgotten once its prompt is computed. Without watched sequences, a step costs nothing here.
    """

    def __init__(self, live: Container[Sequence]) -> None:
        """`live` are the sequences that have not ended."""
        self._live = live
        self._begun_s: dict[Sequence, float] = {}
        """Watched sequence → when its first step began; 0 before that."""
        self._outputs: list[StepOutput] = []

    def watch(self, seq: Sequence) -> None:
        """Report the prompt of a sequence that is being queued."""
        self._begun_s[seq] = 0.0

    def note_completed(self, completed: InFlightStep) -> None:
        """Report the watched prompts of a completed step."""
        if not self._begun_s:
            return
        for seq in [seq for seq in self._begun_s if seq not in self._live]:
            del self._begun_s[seq]
        for seq, end in zip(completed.step.seqs, completed.step.ends.tolist(), strict=True):
            if seq in self._begun_s:
                self._outputs.append(self._report(seq, end, completed.started_s))

    def take(self) -> list[StepOutput]:
        """Return the reports since the last call."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def _report(self, seq: Sequence, end: int, started_s: float) -> StepOutput:
        begun_s = self._begun_s[seq] = self._begun_s[seq] or started_s
        total = seq.num_prompt_tokens
        time_ms = round(1000 * (time.perf_counter() - begun_s))
        progress = PrefillProgress(total, seq.cached_tokens or 0, min(end, total), time_ms)
        if end >= total:
            del self._begun_s[seq]
        return StepOutput(seq.request_id, seq.choice, 0, (), "", None, prefill=progress)
