"""Backlogs in virtual time: steps of simulated nodes take what a model of step times says, with noise.

The queue's costs, the nodes' predictions and paces, and the estimates are the product's own.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count

from penstock.contract.job import PREDICTED_OUTPUT_TOKENS
from penstock.contract.pool import NodePressure
from penstock.gpu_node.engine.scheduler.budget import StepTime, StepWork
from penstock.gpu_node.jobs.drain import (
    PHASE_PROMPT_TOKENS,
    SHORT_PROMPT_TOKENS,
    DrainEstimator,
    JobWork,
    StepParts,
    phases,
)
from penstock.gpu_node.jobs.held_jobs import RESERVED_QUANTILE
from penstock.gpu_node.service.heartbeat import FEW_STEPS, TYPICAL_COST
from penstock.queue.job_cost import Ahead, LengthPredictor, expected_wait, predict_output

HEARTBEAT_S, LEASE_S, SAMPLE_S = 2.0, 15.0, 5.0
NUM_SAMPLED = 40
"""Queued jobs whose waits are estimated at a time."""
TENANT = "bench"


@dataclass(frozen=True, slots=True)
class SimulatedMachine:
    """The true costs of a node's steps, and its size."""

    name: str
    costs: StepParts
    num_sequences: int
    kv_tokens: int
    publishing_ms: float = 0.0
    """What an output token takes beside the runner's time while jobs are served: other processes on the same cores."""
    cached: float = 0.0
    """The part of each prompt that the prefix cache has."""

    def step_ms(self, num_decoded: int, num_prefilled: int, rng: random.Random) -> float:
        """Return the milliseconds of a step, by chance."""
        costs = self.costs
        planned_ms = costs.fixed_ms + costs.decoded_ms * num_decoded + costs.prompt_ms * num_prefilled
        return planned_ms * math.exp(rng.gauss(0, NOISE))


NOISE = 0.1
"""Standard deviation of the logarithm of a step's time."""
HOST_MS, HOST_PART = 0.5, 0.08
"""What a step takes beside the runner's time: a fixed part, and a part of that time."""
CPU = SimulatedMachine("135M on two cores", StepParts(4.0, 1.0, 1.0), 32, 1 << 16)
GPU = SimulatedMachine("8B on a GPU", StepParts(9.0, 0.03, 0.05), 64, 1 << 17)


@dataclass(slots=True, eq=False)
class BacklogJob:
    """A job, and what its node has computed of it."""

    submitted_s: float
    num_prompt: int
    num_output: int
    """What it will generate."""
    max_tokens: int
    is_background: bool = False
    cost: int = 0
    taken_s: float = math.inf
    num_computed: int = 0
    num_generated: int = 0
    predicted: int = PREDICTED_OUTPUT_TOKENS
    work: JobWork | None = None


Queues = tuple[deque[BacklogJob], deque[BacklogJob]]
"""Foreground and background jobs that wait."""


class SimulatedNode:
    """A node that learns and reports as a real one does. Foreground jobs displace background jobs."""

    def __init__(self, machine: SimulatedMachine, number: int, now_s: float, rng: random.Random) -> None:
        self.number, self.now_s, self.next_heartbeat_s = number, now_s, now_s
        self.held: list[BacklogJob] = []
        self._looked_up = 0, 0
        self._kind_seconds, self._waits, self._since_s = (0.0, 0.0), (False, False), now_s
        self._machine, self._rng = machine, rng
        self._steps, self._num_steps = StepTime(), 0
        self._lengths, self._drain = LengthPredictor(RESERVED_QUANTILE), DrainEstimator()
        took_ms = [self._phase_ms(*phase) for phase in phases(machine.num_sequences)]
        self._measured = StepParts.measured(took_ms, machine.num_sequences)

    def _phase_ms(self, num_sequences: int, num_outputs: int) -> float:
        length = PHASE_PROMPT_TOKENS if num_sequences > 1 else SHORT_PROMPT_TOKENS
        prompts_ms = self._machine.step_ms(0, length, self._rng)
        return prompts_ms + sum(self._machine.step_ms(num_sequences, 0, self._rng) for _ in range(num_outputs - 1))

    def take(self, queues: Queues, now_s: float) -> None:
        """Take what fits."""
        for queue in queues:
            while queue and self._fits(queue[0]):
                job = queue.popleft()
                cached = int(self._machine.cached * job.num_prompt)
                job.taken_s, job.num_computed = now_s, cached
                self._looked_up = self._looked_up[0] + cached, self._looked_up[1] + job.num_prompt
                known = self._lengths.predict(TENANT, job.num_prompt, job.max_tokens)
                job.predicted = min(job.max_tokens, known or PREDICTED_OUTPUT_TOKENS)
                job.work = self._drain.begin(
                    is_background=job.is_background,
                    cost=job.cost,
                    num_prompt=job.num_prompt,
                    max_output=job.max_tokens,
                    num_choices=1,
                    num_logged=job.num_generated,
                )
                self.held.append(job)
        waits = bool(queues[0]), bool(queues[1])
        if waits != self._waits:
            self._waits, self._since_s = waits, now_s
            self._look_at_work()
            self._drain.note_queue(now_s, foreground_waits=waits[0], background_waits=waits[1])

    def _fits(self, job: BacklogJob) -> bool:
        counted = [one for one in self.held if job.is_background or not one.is_background]
        has_row = len(counted) < self._machine.num_sequences
        return has_row and self._expected_kv(counted) + job.cost <= self._machine.kv_tokens

    def _expected_kv(self, jobs: Iterable[BacklogJob]) -> int:
        return sum(job.num_prompt + max(job.num_generated, min(job.max_tokens, job.predicted)) for job in jobs)

    def step(self) -> None:
        """Compute a step. Prompts take at most half of its time."""
        in_order = sorted(self.held, key=lambda job: job.is_background)[: self._machine.num_sequences]
        decoding = [job for job in in_order if job.num_computed >= job.num_prompt]
        costs = self._machine.costs
        left, num_prefilled_first = 512, 0
        if decoding:
            left = max(16, int((costs.fixed_ms + costs.decoded_ms * len(decoding)) / costs.prompt_ms))
        num_prefilled = 0
        for job in in_order:
            if job.num_computed < job.num_prompt and num_prefilled < left:
                chunk = min(left - num_prefilled, job.num_prompt - job.num_computed)
                job.num_computed, num_prefilled = job.num_computed + chunk, num_prefilled + chunk
                job.num_generated += job.num_computed == job.num_prompt
                num_prefilled_first += 0 if job.is_background else chunk
        took_ms = self._machine.step_ms(len(decoding), num_prefilled, self._rng)
        num_decoding_first = sum(not job.is_background for job in decoding)
        self._note_kinds(took_ms, (num_decoding_first, num_prefilled_first), (len(decoding), num_prefilled))
        self._steps.note(StepWork(len(decoding), num_prefilled, 0, 0), took_ms)
        self._num_steps += 1
        self.now_s += (HOST_MS + (1 + HOST_PART) * took_ms) / 1000
        self.now_s += self._machine.publishing_ms * len(decoding) / 1000
        for job in decoding:
            job.num_generated += 1
        for job in [job for job in in_order if job.num_generated >= job.num_output]:
            self._end(job)

    def _note_kinds(self, took_ms: float, first: tuple[int, int], all_work: tuple[int, int]) -> None:
        """Divide the time of a step between both kinds of work, as an engine does: background work has what it adds.

        `first`, `all_work`: decoded and prefilled tokens of foreground work, and of both kinds.
        """
        costs = self._machine.costs
        first_ms, all_ms = (
            (costs.fixed_ms + costs.decoded_ms * decoded + costs.prompt_ms * prefilled) * (decoded + prefilled > 0)
            for decoded, prefilled in (first, all_work)
        )
        first_s = took_ms / 1000 * (first_ms / all_ms if all_ms else 0.0)
        self._kind_seconds = self._kind_seconds[0] + first_s, self._kind_seconds[1] + took_ms / 1000 - first_s

    def _end(self, job: BacklogJob) -> None:
        self.held.remove(job)
        if job.work is not None:
            self._drain.note(job.work, job.num_generated, has_ended=True)
        self._lengths.ended(TENANT, job.num_prompt, job.max_tokens, job.num_generated, job.predicted)

    def _look_at_work(self) -> None:
        for job in self.held:
            if job.work is not None:
                self._drain.note(job.work, job.num_generated)

    def pressure(self, queues: Queues) -> NodePressure:
        """Return the record of a heartbeat."""
        size = self._machine
        self._look_at_work()
        num_running = min(len(self.held), size.num_sequences)
        waits = [bool(queue) for queue in queues]
        self._drain.update(
            self.now_s,
            num_running=num_running,
            foreground_waits=waits[0],
            background_waits=waits[1],
            since_s=self._since_s,
            kind_seconds=self._kind_seconds,
        )
        learned = self._steps.costs_ms
        costs = self._measured if learned is None or self._num_steps < FEW_STEPS else StepParts(*learned)
        num_sequences = num_running if any(waits) else min(size.num_sequences, size.kv_tokens // TYPICAL_COST)
        hits, lookups = self._looked_up
        costs = costs.with_cache(hits / lookups if lookups else 0.0)
        foreground, background = self._drain.paces(costs, max(1, num_sequences))
        return NodePressure(
            str(self.number),
            num_jobs=len(self.held),
            block_size=1,
            kv_blocks_total=size.kv_tokens,
            kv_tokens_available=max(0, size.kv_tokens - self._expected_kv(self.held)),
            drain_cost_per_s=foreground.cost_per_s,
            background_cost_per_s=background.cost_per_s,
            pace_spreads=(foreground.spread, background.spread),
            predicted_outputs=self._lengths.of_all_tenants(),
        )


@dataclass(slots=True)
class ComparedWait:
    """An estimate, and what came true. Seconds."""

    at_s: float
    submitted_s: float
    true_s: float
    wait_s: float
    p10_s: float
    p90_s: float

    @property
    def error(self) -> float:
        """The larger one of the two quotients of estimate and truth."""
        ratio = max(self.wait_s, 0.001) / max(self.true_s, 0.001)
        return max(ratio, 1 / ratio)

    @property
    def is_inside(self) -> bool:
        """Whether the truth lies in the interval."""
        return self.p10_s <= self.true_s <= self.p90_s


@dataclass(frozen=True, slots=True)
class Scenario:
    """A backlog and the nodes that complete it. A node joins or dies at `changes_s`. The first one may join late."""

    name: str
    description: str
    jobs: Callable[[random.Random], list[BacklogJob]]
    machine: SimulatedMachine = CPU
    joins_s: tuple[float, ...] = (0.0,)
    dies_s: float = math.inf

    @property
    def changes_s(self) -> float:
        """When the number of nodes changes; infinite: never."""
        if self.dies_s < math.inf:
            return self.dies_s
        return self.joins_s[-1] if self.joins_s[-1] > self.joins_s[0] else math.inf


def _mixed(
    num_jobs: int, over_s: float = 2.0, max_tokens: int = 1024, *, background: bool = False
) -> Callable[[random.Random], list[BacklogJob]]:
    """Return a backlog of prompts of 16 to 600 tokens and outputs of 2 to 240, mostly short ones."""

    def make(rng: random.Random) -> list[BacklogJob]:
        jobs = []
        for number in range(num_jobs):
            prompt = rng.randint(*rng.choice(((16, 64), (64, 256), (200, 600))))
            output = rng.randint(*rng.choice(((2, 30), (20, 120), (80, 240))))
            jobs.append(BacklogJob(over_s * number / num_jobs, prompt, output, max_tokens, background))
        return jobs

    return make


def _own_limits(rng: random.Random) -> list[BacklogJob]:
    jobs = _mixed(2000)(rng)
    for job in jobs:
        job.max_tokens = 1 + int(job.num_output * rng.uniform(1.5, 6))
    return jobs


def _alike(max_tokens: int, num_output: int) -> Callable[[random.Random], list[BacklogJob]]:
    return lambda rng: [BacklogJob(0.001 * at, 100, num_output, max_tokens) for at in range(2000)]


def _long(rng: random.Random) -> list[BacklogJob]:
    """Return jobs as the demo model has them: half of the outputs are longer than the queue assumes."""
    lengths = (10, 12), (30, 90), (200, 320), (380, 512)
    return [BacklogJob(0.001 * at, rng.randint(16, 150), rng.randint(*rng.choice(lengths)), 512) for at in range(1000)]


def _beside_chats(rng: random.Random) -> list[BacklogJob]:
    jobs, at_s = _mixed(1500, background=True)(rng), 0.0
    while at_s < 3600:
        at_s += rng.expovariate(2.0)
        jobs.append(BacklogJob(at_s, rng.randint(20, 200), rng.randint(20, 150), 512))
    return sorted(jobs, key=lambda job: job.submitted_s)


SCENARIOS = (
    Scenario("mixed", "2,000 jobs at once, `max_tokens` 1024", _mixed(2000)),
    Scenario("own limits", "the same, `max_tokens` 1.5 to 6 × the output", _own_limits),
    Scenario("alike", "2,000 jobs of 100 tokens in, 60 out, `max_tokens` 512", _alike(512, 60)),
    Scenario("to the limit", "2,000 jobs of 100 tokens in, 128 out, `max_tokens` 128", _alike(128, 128)),
    Scenario("long", "1,000 jobs of 10 to 512 tokens out, 220 on average, `max_tokens` 512", _long),
    Scenario("slowly", "2,000 jobs over 2 minutes", _mixed(2000, over_s=120.0)),
    Scenario("GPU", "8,000 jobs at once on a GPU", _mixed(8000), GPU),
    Scenario("joins", "3,000 jobs; a second node joins after 60 s", _mixed(3000), joins_s=(0.0, 60.0)),
    Scenario("dies", "3,000 jobs on three nodes; one is killed after 60 s", _mixed(3000), CPU, (0.0,) * 3, 60.0),
    Scenario("loads", "2,000 jobs in a pool that loads for 60 s: from then on", _mixed(2000), joins_s=(60.0,)),
    Scenario("beside chats", "1,500 background jobs beside 2 chats/s", _beside_chats),
)


class Replay:
    """One run of a scenario."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self._rng = random.Random(seed)
        self._coming = deque(scenario.jobs(self._rng))
        self._num_left = sum(job.is_background for job in self._coming) or len(self._coming)
        self._counts_background = any(job.is_background for job in self._coming)
        self._queues: Queues = deque(), deque()
        self._machine = scenario.machine
        self._joins_s, self._dies_s = deque(scenario.joins_s), scenario.dies_s
        self._nodes: list[SimulatedNode] = []
        self._numbers = count()
        self._lost: SimulatedNode | None = None
        self._pressures: dict[int, NodePressure] = {}

    def run(self) -> list[ComparedWait]:
        """Return the estimates with what came true."""
        now_s, next_sample_s, estimates = 0.0, 1.0, list[tuple[BacklogJob, ComparedWait]]()
        while self._is_busy():
            self._change_nodes(now_s)
            self._send_heartbeats(now_s)
            self._submit(now_s)
            for node in self._nodes:
                node.take(self._queues, now_s)
            if now_s >= next_sample_s:
                next_sample_s += SAMPLE_S
                estimates += self._sample(now_s)
            now_s = self._step(now_s)
        for job, one in estimates:
            one.true_s = job.taken_s - one.at_s
        return [one for _, one in estimates if one.true_s < math.inf]

    def _is_busy(self) -> bool:
        if self._counts_background:
            return bool(self._queues[1]) or any(job.is_background for job in self._coming)
        return bool(self._coming) or any(self._queues)

    def _change_nodes(self, now_s: float) -> None:
        while self._joins_s and self._joins_s[0] <= now_s:
            self._joins_s.popleft()
            self._nodes.append(SimulatedNode(self._machine, next(self._numbers), now_s, self._rng))
        if now_s >= self._dies_s:
            self._lost, self._dies_s = self._nodes.pop(), math.inf
        if self._lost is not None and now_s >= self._lost.now_s + LEASE_S:
            del self._pressures[self._lost.number]
            for job in sorted(self._lost.held, key=lambda one: -one.submitted_s):
                job.taken_s = math.inf
                self._queues[job.is_background].appendleft(job)
            self._lost = None

    def _send_heartbeats(self, now_s: float) -> None:
        for node in self._nodes:
            if node.next_heartbeat_s <= now_s:
                node.now_s = max(node.now_s, now_s)
                self._pressures[node.number] = node.pressure(self._queues)
                node.next_heartbeat_s = now_s + HEARTBEAT_S

    def _submit(self, now_s: float) -> None:
        nodes = tuple(self._pressures.values())
        while self._coming and self._coming[0].submitted_s <= now_s:
            job = self._coming.popleft()
            job.cost = job.num_prompt + predict_output(nodes, job.num_prompt, job.max_tokens)
            self._queues[job.is_background].append(job)

    def _sample(self, now_s: float) -> Iterator[tuple[BacklogJob, ComparedWait]]:
        """Estimate the waits of some queued jobs as `QueuePositions` does: with the mean cost of their level."""
        nodes, (foreground, background) = tuple(self._pressures.values()), self._queues
        queue = background if self._counts_background else foreground
        mean = sum(job.cost for job in queue) / max(1, len(queue))
        before = sum(job.cost for job in foreground) if self._counts_background else 0
        stride = max(1, len(queue) // NUM_SAMPLED)
        for at in range(self._rng.randrange(stride), len(queue), stride):
            ahead = Ahead(at + len(foreground), before, mean * at) if self._counts_background else Ahead(at, mean * at)
            wait = expected_wait(nodes, ahead, is_background=self._counts_background)
            if wait.estimated_wait_ms is not None:
                value_s, *interval_s = (ms / 1000 for ms in wait if ms is not None)
                yield queue[at], ComparedWait(now_s, queue[at].submitted_s, math.inf, value_s, *interval_s)

    def _step(self, now_s: float) -> float:
        """Let nodes compute the steps that are due, and return the time of what comes next."""
        busy = [node for node in self._nodes if node.held]
        for node in busy:
            if node.now_s <= now_s:
                node.now_s = now_s
                node.step()
        ends = [node.now_s for node in busy] + ([self._coming[0].submitted_s] if self._coming else [])
        return max(now_s + 1e-4, min([*ends, now_s + 0.25]))
