"""What an engine notes about single requests while they run: how far a prompt is computed, and where the time went."""

from __future__ import annotations

import time
from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from penstock.contract.output import PrefillProgress
from penstock.gpu_node.engine.records import RequestStep, RequestTimings, StepOutput
from penstock.gpu_node.engine.sequence import Sequence as Choice
from penstock.gpu_node.engine.steps import InFlightStep


class PrefillReports:
    """Makes an output without tokens for each part of a watched prompt that a step has computed.

    A watched sequence is forgotten once its prompt is computed. Without watched sequences, a step costs nothing here.
    """

    def __init__(self, live: Container[Choice]) -> None:
        """`live` are the sequences that have not ended."""
        self._live = live
        self._begun_s: dict[Choice, float] = {}
        """Watched sequence → when its first step began; 0 before that."""
        self._outputs: list[StepOutput] = []

    def watch(self, seq: Choice) -> None:
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

    def _report(self, seq: Choice, end: int, started_s: float) -> StepOutput:
        begun_s = self._begun_s[seq] = self._begun_s[seq] or started_s
        total = seq.num_prompt_tokens
        time_ms = round(1000 * (time.perf_counter() - begun_s))
        progress = PrefillProgress(total, seq.cached_tokens or 0, min(end, total), time_ms)
        if end >= total:
            del self._begun_s[seq]
        return StepOutput(seq.request_id, seq.choice, 0, (), "", None, prefill=progress)


MAX_ENDED = 1024
"""Ended requests whose times are kept."""


@dataclass(slots=True)
class _Timer:
    """The times of one request, as `time.perf_counter` gives them."""

    added_s: float
    begun_s: float | None = None
    first_token_s: float | None = None
    ended_s: float | None = None
    steps: list[tuple[float, float, int]] = field(default_factory=list)
    """Of each of its steps: the end, the milliseconds that it took, and the tokens that the request computed."""
    cached_tokens: int = 0
    num_preemptions: dict[int, int] = field(default_factory=dict)
    """By choice."""

    def timings(self) -> RequestTimings:
        return RequestTimings(
            queued_ms=self._since(self.begun_s),
            first_token_ms=self._since(self.first_token_s),
            ended_ms=self._since(self.ended_s),
            steps=tuple(RequestStep(1e3 * (at_s - self.added_s), took_ms, n) for at_s, took_ms, n in self.steps),
            cached_tokens=self.cached_tokens,
            num_preemptions=sum(self.num_preemptions.values()),
        )

    def _since(self, at_s: float | None) -> float | None:
        return None if at_s is None else 1e3 * (at_s - self.added_s)


class RequestTimers:
    """Times of the requests that ask for them. Without such requests, a step only looks at `running`."""

    def __init__(self) -> None:
        self.running: dict[str, _Timer] = {}
        """The timers of requests that have not ended."""
        self._ended: dict[str, _Timer] = {}

    def add(self, request_id: str) -> None:
        """Time a request that is being queued."""
        self._ended.pop(request_id, None)
        self.running[request_id] = _Timer(time.perf_counter())

    def note_completed(self, completed: InFlightStep) -> None:
        """Note a completed step with each timed request in it."""
        now_s, step = time.perf_counter(), completed.step
        num_computed: dict[str, int] = {}
        for seq, start, end in zip(step.seqs, step.starts.tolist(), step.ends.tolist(), strict=True):
            if (timer := self.running.get(seq.request_id)) is None:
                continue
            num_computed[seq.request_id] = num_computed.get(seq.request_id, 0) + end - start
            if timer.begun_s is None:
                timer.begun_s = completed.started_s
            timer.cached_tokens = max(timer.cached_tokens, seq.cached_tokens or 0)
            timer.num_preemptions[seq.choice] = seq.num_preemptions
        for request_id, count in num_computed.items():
            self.running[request_id].steps.append((now_s, completed.age_ms, count))

    def note_outputs(self, outputs: Sequence[StepOutput]) -> None:
        """Note first tokens and ends."""
        now_s = time.perf_counter()
        for output in outputs:
            if (timer := self.running.get(output.request_id)) is None:
                continue
            if output.token_ids and timer.first_token_s is None:
                timer.first_token_s = now_s
            timer.num_preemptions[output.choice] = output.num_preemptions
            if output.usage is not None:
                self.end(output.request_id)

    def end(self, request_id: str) -> None:
        """Note that a request has ended or was aborted; does nothing for a request without times."""
        if (timer := self.running.pop(request_id, None)) is None:
            return
        timer.ended_s = time.perf_counter()
        self._ended[request_id] = timer
        if len(self._ended) > MAX_ENDED:
            del self._ended[next(iter(self._ended))]

    def timings(self, request_id: str) -> RequestTimings | None:
        """Return the times of a request so far; None for a request that is not timed, or whose times are dropped."""
        timer = self.running.get(request_id) or self._ended.get(request_id)
        return None if timer is None else timer.timings()
