"""What an engine measures: the parts of its steps, its counters, progress and times of its requests, and profiles."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Container, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol, TypedDict, runtime_checkable

from penstock.contract.output import PrefillProgress
from penstock.gpu_node.engine.kv_cache.manager import KvCacheManager
from penstock.gpu_node.engine.kv_cache.states import state_counts
from penstock.gpu_node.engine.kv_cache.windows import window_counts
from penstock.gpu_node.engine.records import EngineStats, RequestStep, RequestTimings, StepOutput
from penstock.gpu_node.engine.scheduler.scheduler import Scheduler
from penstock.gpu_node.engine.search.searches import SharedBlocks
from penstock.gpu_node.engine.sequence import Sequence as Choice
from penstock.gpu_node.engine.steps import InFlightStep
from penstock.gpu_node.engine.structured.lanes import GrammarCounts
from penstock.gpu_node.model.protocol import (
    NO_RANKS,
    LoadedModel,
    ModelRunner,
    ProfiledRunner,
    RecoverableRunner,
    StepResult,
)
from penstock.runtime.histogram import Histogram
from penstock.runtime.process_memory import resident_bytes

_WINDOW = 256
STEP_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 20.0)
"""Upper bounds of the histogram of step times."""
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper bounds of the histograms of a step's sequences and tokens."""
PARTS = ("schedule", "prepare", "copies", "forward", "sample", "output")
"""The parts of a step, in the order in which they run; `EngineStats` describes them."""


class SampleWindow:
    """One time for each of the last few hundred steps. As a context manager it measures one."""

    def __init__(self) -> None:
        self._values_ms: deque[float] = deque(maxlen=_WINDOW)
        self._entered_s = 0.0
        self.total_ms = 0.0
        """Sum of the times of all steps, not only of the last ones."""

    def add(self, value_ms: float) -> None:
        """Add a step's time."""
        self._values_ms.append(value_ms)
        self.total_ms += value_ms

    @property
    def last(self) -> float:
        """The newest time; 0 before the first."""
        return self._values_ms[-1] if self._values_ms else 0.0

    def mean(self) -> float:
        """Return the mean; 0 before the first time."""
        return sum(self._values_ms) / max(1, len(self._values_ms))

    def percentile(self, percent: int) -> float:
        """Return the time that `percent` percent of the steps stay below; 0 before the first."""
        ordered = sorted(self._values_ms) or [0.0]
        return ordered[len(ordered) * percent // 100]

    def __enter__(self) -> None:
        self._entered_s = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.add((time.perf_counter() - self._entered_s) * 1e3)


class StepStats(TypedDict):
    """The fields of EngineStats that steps fill."""

    steps: int
    num_failed_steps: int
    num_memory_failures: int
    prefill_tokens: int
    decode_tokens: int
    copied_blocks: int
    step_ms_p50: float
    step_ms_p99: float
    schedule_ms: float
    prepare_ms: float
    copy_ms: float
    forward_ms: float
    sample_ms: float
    output_ms: float
    part_seconds: dict[str, float]
    eager_steps: dict[str, int]
    step_seconds: Histogram
    batch_sequences: Histogram
    batch_tokens: Histogram


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """The times of one step. `EngineStats` describes the parts."""

    ended_s: float
    """When its tokens were committed, by `time.perf_counter`."""
    step_ms: float
    copies_ms: float
    forward_ms: float
    sample_ms: float
    schedule_ms: float
    prepare_ms: float
    output_ms: float
    """The time that the outputs of the step before took."""
    num_sequences: int
    num_prefill_tokens: int
    num_tokens: int
    """Tokens sampled, those of choices that have ended included."""


@dataclass(slots=True)
class StepTimings:
    """Counters and times of steps; `EngineStats` describes each part."""

    steps: int = 0
    num_failed_steps: int = 0
    num_memory_failures: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    copied_blocks: int = 0
    eager_steps: Counter[str] = field(default_factory=Counter)

    step: SampleWindow = field(default_factory=SampleWindow)
    copies: SampleWindow = field(default_factory=SampleWindow)
    schedule: SampleWindow = field(default_factory=SampleWindow)
    prepare: SampleWindow = field(default_factory=SampleWindow)
    forward: SampleWindow = field(default_factory=SampleWindow)
    sample: SampleWindow = field(default_factory=SampleWindow)
    output: SampleWindow = field(default_factory=SampleWindow)

    step_seconds: Histogram = field(default_factory=lambda: Histogram(STEP_SECONDS))
    batch_sequences: Histogram = field(default_factory=lambda: Histogram(BATCH_SIZES))
    batch_tokens: Histogram = field(default_factory=lambda: Histogram(BATCH_SIZES))
    recorded: list[RecordedStep] | None = None
    """The steps of a profile while there is one."""

    def note_completed(self, in_flight: InFlightStep, result: StepResult, num_tokens: int) -> None:
        """Count a computed step that yielded `num_tokens` tokens, those of choices that have ended included."""
        self.steps += 1
        self.prefill_tokens += in_flight.step.num_prefill_tokens
        self.copied_blocks += len(in_flight.step.copies)
        if result.eager is not None:
            self.eager_steps[result.eager] += 1
        age_ms = in_flight.age_ms
        self.step.add(age_ms)
        self.step_seconds.note(age_ms / 1000)
        self.batch_sequences.note(len(in_flight.step.seqs))
        self.batch_tokens.note(in_flight.step.num_prefill_tokens + num_tokens)
        self.copies.add(result.copy_ms)
        self.forward.add(result.forward_ms)
        self.sample.add(result.sample_ms)
        if self.recorded is not None:
            parts = result.copy_ms, result.forward_ms, result.sample_ms
            own = self.schedule.last, self.prepare.last, self.output.last
            sizes = len(in_flight.step.seqs), in_flight.step.num_prefill_tokens, num_tokens
            self.recorded.append(RecordedStep(time.perf_counter(), age_ms, *parts, *own, *sizes))

    def note_failed(self, error: Exception) -> None:
        """Count a failed step."""
        self.num_failed_steps += 1
        self.num_memory_failures += isinstance(error, MemoryError)

    def stats(self) -> StepStats:
        """Return the counters and times as fields of EngineStats."""
        return StepStats(
            steps=self.steps,
            num_failed_steps=self.num_failed_steps,
            num_memory_failures=self.num_memory_failures,
            prefill_tokens=self.prefill_tokens,
            decode_tokens=self.decode_tokens,
            copied_blocks=self.copied_blocks,
            step_ms_p50=self.step.percentile(50),
            step_ms_p99=self.step.percentile(99),
            schedule_ms=self.schedule.mean(),
            prepare_ms=self.prepare.mean(),
            copy_ms=self.copies.mean(),
            forward_ms=self.forward.mean(),
            sample_ms=self.sample.mean(),
            output_ms=self.output.mean(),
            part_seconds={name: getattr(self, name).total_ms / 1000 for name in PARTS},
            eager_steps=dict(self.eager_steps),
            step_seconds=self.step_seconds.copy(),
            batch_sequences=self.batch_sequences.copy(),
            batch_tokens=self.batch_tokens.copy(),
        )


MAX_STEPS = 20_000
"""Steps that a profile keeps."""
MAX_STEPS_OF_RUNNER = 50
"""The same where the runner records its operations: thousands for each step, which take half a second to write."""


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """The steps and requests that an engine recorded."""

    steps: tuple[RecordedStep, ...]
    has_operations: bool
    """Whether the runner recorded its operations."""


@runtime_checkable
class ProfiledEngine(Protocol):
    """An engine that can record its steps."""

    @property
    def profiler(self) -> EngineProfiler:
        """The recorder of its steps."""


class EngineProfiler:
    """Records an engine's steps, and the runner's operations in them if the runner supports that.

    Without a profile, a step only checks whether there is one.
    """

    def __init__(self, timings: StepTimings, runner: ModelRunner) -> None:
        self._timings = timings
        self._runner = runner if isinstance(runner, ProfiledRunner) else None
        self._recorded: list[RecordedStep] = []

    @property
    def is_full(self) -> bool:
        """Whether it has recorded as many steps as it keeps. Safe on any thread."""
        return len(self._recorded) >= (MAX_STEPS if self._runner is None else MAX_STEPS_OF_RUNNER)

    def start(self) -> None:
        """Start recording, on the engine's thread."""
        if self._runner is not None:
            self._runner.start_profile()
        self._timings.recorded = self._recorded = []

    def stop(self) -> EngineProfile:
        """Stop recording, on the engine's thread."""
        self._timings.recorded = None
        if self._runner is not None:
            self._runner.stop_profile()
        return EngineProfile(tuple(self._recorded), has_operations=self._runner is not None)

    def write_operations(self, path: Path) -> None:
        """Write the runner's operations as a Chrome trace. It may take seconds: call it on a thread of its own."""
        if self._runner is not None:
            self._runner.write_profile(path)


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
        # Keyed by id: id of a request.
        self.running: dict[str, _Timer] = {}
        """The timers of requests that have not ended."""
        # Keyed by id: id of a request.
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


def engine_stats(
    memory: KvCacheManager,
    scheduler: Scheduler,
    timings: StepTimings,
    grammars: GrammarCounts,
    model: LoadedModel,
    block_size: int,
    shared: SharedBlocks,
) -> EngineStats:
    """Return a snapshot of memory, queues and counters."""
    device, host, hits = memory.device, memory.host, scheduler.prefix_hits
    ranks = model.runner.ranks if isinstance(model.runner, RecoverableRunner) else NO_RANKS
    return EngineStats(
        kv_blocks_total=device.num_total,
        kv_blocks_free=device.num_free,
        kv_blocks_cached=device.num_cached,
        kv_evictions=device.num_evictions,
        block_size=block_size,
        num_running=scheduler.num_running,
        num_held_back=min(scheduler.background.num_left_out, scheduler.num_running),
        num_waiting=scheduler.queues.num_waiting,
        num_preemptions=scheduler.num_preemptions,
        prefix_lookup_tokens=hits.lookup_tokens,
        prefix_hit_tokens=hits.hit_tokens,
        swap_hit_tokens=hits.host_tokens,
        kv_tokens_used=memory.num_held * block_size - scheduler.num_tokens_unused,
        swap_blocks_total=host.num_total,
        swap_blocks_free=host.num_free,
        swap_blocks_cached=host.num_cached,
        swap_evictions=host.num_evictions,
        swapped_out_blocks=memory.num_out,
        swapped_in_blocks=memory.num_in,
        search_blocks_needed=shared.needed,
        search_blocks_held=shared.held,
        num_swapped=len(scheduler.queues.swapped),
        num_swaps=scheduler.num_swaps,
        drafted_tokens=scheduler.drafts.num_drafted,
        accepted_tokens=scheduler.drafts.num_accepted,
        max_step_tokens=scheduler.max_step_tokens,
        process_bytes=resident_bytes(),
        kind_seconds=scheduler.background.engine_time.seconds,
        level_seconds=scheduler.background.engine_time.level_seconds,
        step_costs_ms=scheduler.background.engine_time.step_costs_ms,
        background_held_back=scheduler.background.num_held_back,
        background_due=scheduler.background.is_due,
        arithmetic=model.arithmetic,
        block_bytes=model.runner.cache_sizes.block_bytes,
        weight_bytes=model.runner.placement.weight_bytes,
        gpu_uuid=model.runner.placement.gpu_uuid,
        ranks=ranks,
        num_ranks=ranks.num_ranks,
        num_rank_losses=max(0, ranks.num_starts - 1),
        **state_counts(memory.states),
        **window_counts(memory.windows),
        **timings.stats(),
        **asdict(grammars),
    )
