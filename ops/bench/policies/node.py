"""A simulated node that serves a load by a policy.

The order, the victims, virtual times and predicted lengths are penstock's own code; only a step's time is a formula. As
in a node, one quantile of lengths is reserved and another one orders the queue.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from penstock.gpu_node.engine.policy.by_policy import ORDERING_QUANTILE
from penstock.queue.job_cost import HOLD_MS, LengthPredictor, learned_hold_ms
from penstock.queue.policy import PolicyConfig, PolicyName, choose, preemption_order, victims_of
from penstock.queue.policy_state import PolicyState

CLASSES = ("interactive", "standard", "batch")
KV_TOKENS, MAX_RUNNING, STEP_TOKENS = 8192, 32, 512
RESERVED_QUANTILE = 0.8
UNKNOWN_TOKENS = 256
AGING_MS, BYPASS_MS = 60_000, 2_000


@dataclass(slots=True, eq=False)
class SimulatedJob:
    """One job of a load, and how far it is."""

    job_id: str
    tenant: str
    level: int
    submitted_ms: int
    num_prompt: int
    max_tokens: int
    num_output: int
    predicted: int = 0
    ordered_by: int = 0
    """The length that was predicted for its place in the order when it came."""
    remaining: int = 0
    urgency: int = 0
    num_done: int = 0
    num_stored: int = 0
    charge: float = 0.0
    kv_token_ms: float = 0.0
    started_ms: float = 0.0
    first_ms: float = 0.0
    finished_ms: float = 0.0

    @property
    def cost(self) -> int:
        return self.num_prompt + max(self.predicted, self.num_done)

    @property
    def remaining_cost(self) -> int:
        return self.num_prompt + self.remaining

    @property
    def num_missing(self) -> int:
        return self.num_prompt + self.num_done - self.num_stored + (self.num_done == 0)


@dataclass(frozen=True)
class SimulationResult:
    """The result of one load under one policy. Times in ms."""

    mean_completion: float
    completion_p50: dict[str, float]
    completion_p99: dict[str, float]
    ttft_p50: dict[str, float]
    ttft_p99: dict[str, float]
    jain: float
    """Of the tenants' KV-token-seconds while all of them had work: 1 is even, 1 / tenants is all for one."""
    preemptions: int


@dataclass
class Node:
    """A node that runs as many as fit, a step at a time."""

    policy: PolicyConfig
    waiting: list[SimulatedJob] = field(default_factory=list)
    running: list[SimulatedJob] = field(default_factory=list)
    standing: PolicyState = field(default_factory=PolicyState)
    predictor: LengthPredictor = field(default_factory=lambda: LengthPredictor(RESERVED_QUANTILE))
    ordering_predictor: LengthPredictor = field(default_factory=lambda: LengthPredictor(ORDERING_QUANTILE))
    now_ms: float = 0.0
    hold_ms: float = HOLD_MS
    preemptions: int = 0
    kv_token_ms_by_tenant: dict[str, float] = field(default_factory=dict)

    def submit(self, job: SimulatedJob) -> None:
        known = self.predictor.predict(job.tenant, job.num_prompt, job.max_tokens)
        job.predicted = known or min(job.max_tokens, UNKNOWN_TOKENS)
        job.ordered_by = self._remaining(job)
        self._queue(job)

    def step(self) -> list[SimulatedJob]:
        """Start the jobs that may start and compute one step; return the jobs that it ended."""
        self._start()
        grants = self._grants()
        num_prefill = sum(grant for grant in grants.values() if grant > 1)
        took_ms = 6.0 + 0.2 * len(grants) + 0.04 * num_prefill
        self.now_ms += took_ms
        for job in self.running:
            job.kv_token_ms += job.num_stored * took_ms
            held = self.kv_token_ms_by_tenant.get(job.tenant, 0.0)
            self.kv_token_ms_by_tenant[job.tenant] = held + job.num_stored * took_ms
        return [job for job, grant in grants.items() if self._advance(job, grant)]

    def _queue(self, job: SimulatedJob) -> None:
        job.remaining = self._remaining(job)
        self.waiting.append(job)
        self.standing.virtual_times[job.level].enter(job.tenant)

    def _remaining(self, job: SimulatedJob) -> int:
        return self.ordering_predictor.remaining(job.tenant, job.num_prompt, job.max_tokens, job.num_done)

    def _order_of_victims(self, job: SimulatedJob) -> int:
        return self._remaining(job) if self.policy.name == "sjf" else 0

    def _start(self) -> None:
        for job in choose(self.waiting, self.policy, self.standing, int(self.now_ms), self._fits):
            self.waiting.remove(job)
            virtual_times = self.standing.virtual_times[job.level]
            if all((other.tenant, other.level) != (job.tenant, job.level) for other in self.waiting):
                virtual_times.leave(job.tenant)

    def _fits(self, job: SimulatedJob, urgency: int) -> bool:
        less_urgent = [one for one in self.running if one.urgency > urgency]
        victims = victims_of(urgency, less_urgent, self._order_of_victims)
        if not self._has_room(job, [one for one in self.running if one.urgency <= urgency]):
            return False
        while not self._has_room(job, self.running):
            self._preempt(victims.pop(0))
        job.charge = job.cost * self.hold_ms
        job.urgency, job.started_ms = urgency, self.now_ms
        self.running.append(job)
        return True

    def _has_room(self, job: SimulatedJob, running: list[SimulatedJob]) -> bool:
        if len(running) >= MAX_RUNNING:
            return False
        return not running or sum(one.cost for one in running) + job.cost <= KV_TOKENS

    def _preempt(self, job: SimulatedJob) -> None:
        self.running.remove(job)
        job.num_stored = 0
        self.preemptions += 1
        self._queue(job)
        self.standing.correct(job.level, job.tenant, -job.charge, self.now_ms, job.started_ms)

    def _grants(self) -> dict[SimulatedJob, int]:
        budget, grants = STEP_TOKENS, dict[SimulatedJob, int]()
        num_kv_tokens = sum(job.num_stored for job in self.running)
        for job in list(self.running):
            if budget and job in self.running:
                grants[job] = min(budget, max(1, job.num_missing))
                budget -= grants[job]
                num_kv_tokens += grants[job]
                while num_kv_tokens > KV_TOKENS:
                    victim = preemption_order(self.running, self._order_of_victims)[0]
                    num_kv_tokens -= victim.num_stored + grants.pop(victim, 0)
                    self._preempt(victim)
        return grants

    def _advance(self, job: SimulatedJob, grant: int) -> bool:
        job.num_stored += grant
        if job.num_stored < job.num_prompt + job.num_done:
            return False
        job.num_done += 1
        job.first_ms = job.first_ms or self.now_ms
        if job.num_done < job.num_output:
            return False
        job.finished_ms = self.now_ms
        self.running.remove(job)
        self.standing.correct(job.level, job.tenant, job.kv_token_ms - job.charge, self.now_ms, job.started_ms)
        self.hold_ms = learned_hold_ms(self.hold_ms, job.kv_token_ms, job.num_prompt + job.num_output)
        ended = job.tenant, job.num_prompt, job.max_tokens, job.num_output
        self.predictor.ended(*ended, job.predicted)
        self.ordering_predictor.ended(*ended, job.ordered_by)
        return True


def simulate(name: PolicyName, load: Iterable[SimulatedJob]) -> SimulationResult:
    """Runs a load to its end."""
    arrivals = sorted(load, key=lambda job: job.submitted_ms)[::-1]
    node, ended = Node(PolicyConfig(name, AGING_MS, BYPASS_MS)), list[SimulatedJob]()
    left = {
        tenant: sum(job.tenant == tenant for job in arrivals) for tenant in sorted({job.tenant for job in arrivals})
    }
    shares: dict[str, float] = {}
    while arrivals or node.waiting or node.running:
        if not (node.waiting or node.running):
            node.now_ms = max(node.now_ms, arrivals[-1].submitted_ms)
        while arrivals and arrivals[-1].submitted_ms <= node.now_ms:
            node.submit(arrivals.pop())
        for job in node.step():
            ended.append(job)
            left[job.tenant] -= 1
            if not left[job.tenant] and not shares:
                shares = {tenant: node.kv_token_ms_by_tenant.get(tenant, 0.0) for tenant in left}
    return _result(ended, shares, node.preemptions)


def _result(ended: list[SimulatedJob], shares: dict[str, float], preemptions: int) -> SimulationResult:
    def of_classes(measure: Callable[[SimulatedJob], float], percent: int) -> dict[str, float]:
        values = {name: sorted(measure(job) for job in ended if job.level == p) for p, name in enumerate(CLASSES)}
        return {name: found[(len(found) - 1) * percent // 100] for name, found in values.items() if found}

    def completion(job: SimulatedJob) -> float:
        return job.finished_ms - job.submitted_ms

    def ttft(job: SimulatedJob) -> float:
        return job.first_ms - job.submitted_ms

    return SimulationResult(
        mean_completion=statistics.mean(map(completion, ended)),
        completion_p50=of_classes(completion, 50),
        completion_p99=of_classes(completion, 99),
        ttft_p50=of_classes(ttft, 50),
        ttft_p99=of_classes(ttft, 99),
        jain=sum(shares.values()) ** 2 / (len(shares) * sum(share**2 for share in shares.values())),
        preemptions=preemptions,
    )
