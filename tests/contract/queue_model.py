"""The queue as one reads of it: plain lists and no Redis. The state machine holds the scripts to this."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from penstock.contract.policy import Policy, Standing, choose

PROGRESS_CHUNKS = 4
MAX_LOSSES = 3
KV_TOTAL = 300
SLOTS_TOTAL = 8
TERMINAL = ("done", "failed", "cancelled", "expired")


@dataclass
class ModelNode:
    """A node: `is_known` to the pool or not, `is_silent` for more than a lease or not."""

    name: str
    revision: str
    is_known: bool = True
    is_silent: bool = False
    call: int = 0
    answer: list[tuple[ModelJob, str]] = field(default_factory=list)


@dataclass(eq=False)
class ModelJob:
    """A job and everything that decides about it."""

    job_id: str
    tenant: str
    priority: int
    n: int
    cost: int
    is_background: bool
    has_deadline: bool
    submitted_ms: int = 0
    state: str = "queued"
    code: str = ""
    lease: str = ""
    node: str = ""
    revision: str = ""
    log: list[bytes] = field(default_factory=list)
    is_cancelled: bool = False
    is_past_deadline: bool = False
    is_unread: bool = False
    losses: int = 0
    lost_nodes: set[str] = field(default_factory=set)
    mark: int = 0
    preemptions: int = 0
    avoids: str = ""
    is_back: bool = False
    charge: float = 0.0
    urgency: int = 0

    def is_held(self, node: str, lease: str) -> bool:
        return self.state == "running" and (self.node, self.lease) == (node, lease)

    def end(self, state: str, code: str) -> None:
        self.state, self.code = state, code

    @property
    def is_over(self) -> bool:
        return self.is_cancelled or self.is_past_deadline or (self.is_unread and not self.is_background)

    def end_if_over(self) -> bool:
        if self.is_cancelled:
            self.end("cancelled", "cancelled")
        elif self.is_past_deadline:
            self.end("expired", "deadline_exceeded")
        elif self.is_unread and not self.is_background:
            self.end("cancelled", "unread")
        return self.state in TERMINAL

    def requeue(self) -> None:
        self.state, self.node, self.lease, self.avoids, self.is_back = "queued", "", "", "", True

    def append(self, index: int, chunks: list[bytes]) -> None:
        self.log += chunks[len(self.log) - index :]


class QueueModel:
    """What each call must answer, and what it must leave behind."""

    def __init__(self, policy: Policy, now_ms: int) -> None:
        self.policy = policy
        self.now_ms = now_ms
        self.standing = Standing()
        self.jobs: dict[str, ModelJob] = {}
        self.nodes: dict[str, ModelNode] = {}

    def queued(self, priority: int) -> list[ModelJob]:
        jobs = (j for j in self.jobs.values() if j.state == "queued" and j.priority == priority)
        return sorted(jobs, key=lambda j: (j.submitted_ms, j.job_id))

    def running(self, node: str) -> list[ModelJob]:
        return [j for j in self.jobs.values() if j.state == "running" and j.node == node]

    def submit(self, job: ModelJob) -> None:
        self.jobs[job.job_id] = job
        self.standing.turns[job.priority].enter(job.tenant)

    def take(self, node: ModelNode, room: list[int], slots: list[int], hold_ms: float) -> list[ModelJob]:
        """Jobs that the node is given, in order; their leases are the caller's to fill in."""

        def fits(job: ModelJob, urgency: int) -> bool:
            need, places = min(job.cost, KV_TOTAL), min(job.n, SLOTS_TOTAL)
            if need > room[urgency] or places > slots[urgency]:
                return False
            for lower in range(urgency, 3):
                room[lower] -= need
                slots[lower] -= places
            job.urgency = urgency
            return True

        queued = [job for priority in range(3) for job in self.queued(priority) if not job.is_over]
        ours = [j for j in queued if j.avoids != node.name and (not j.log or j.revision == node.revision)]
        for job in ours:
            job.charge = job.cost * hold_ms
        taken = choose(ours, self.policy, self.standing, self.now_ms, fits)
        for job in taken:
            job.state, job.node, job.revision, job.is_back = "running", node.name, node.revision, False
            self._leave_turn(job)
        return taken

    def _leave_turn(self, job: ModelJob) -> None:
        if job.tenant not in {other.tenant for other in self.queued(job.priority)}:
            self.standing.turns[job.priority].leave(job.tenant)

    def end_if_over(self, job: ModelJob) -> bool:
        was_queued = job.state == "queued"
        if not job.end_if_over():
            return False
        if was_queued:
            self._leave_turn(job)
        return True

    def _requeue(self, job: ModelJob) -> None:
        job.requeue()
        self.standing.turns[job.priority].enter(job.tenant)
        self.standing.turns[job.priority].correct(job.tenant, -job.charge)

    def emit(self, job: ModelJob, node: ModelNode, lease: str, index: int, chunks: list[bytes]) -> str:
        node.is_silent = False
        if not job.is_held(node.name, lease):
            return "FENCED"
        if index > len(job.log):
            return f"NEED {len(job.log)}"
        job.append(index, chunks)
        if job.is_cancelled:
            return "CANCEL"
        if job.is_past_deadline:
            return "EXPIRED"
        return "UNHEARD" if job.is_unread and not job.is_background else "OK"

    def finish(
        self, job: ModelJob, node: ModelNode, lease: str, index: int, chunks: list[bytes], kv_ms: float | None
    ) -> str:
        if job.state in TERMINAL and (job.node, job.lease) == (node.name, lease):
            return "OK"
        if not job.is_held(node.name, lease):
            return "FENCED"
        if index > len(job.log):
            return f"NEED {len(job.log)}"
        job.append(index, chunks)
        job.end("done", "")
        if kv_ms is not None:
            self.standing.turns[job.priority].correct(job.tenant, kv_ms - job.charge)
        return "OK"

    def give_back(self, job: ModelJob, node: ModelNode, lease: str, cost: int) -> str:
        if not job.is_held(node.name, lease):
            return "FENCED"
        if not self.end_if_over(job):
            self._requeue(job)
            job.cost, job.avoids = cost, node.name
            job.preemptions += 1
        return "OK"

    def cancel(self, job: ModelJob) -> str:
        if job.state not in TERMINAL:
            job.is_cancelled = True
            if job.state == "queued":
                self.end_if_over(job)
        return job.state

    def beat(self, node: ModelNode, held: Iterable[str]) -> tuple[set[str], set[str], set[str]]:
        """Cancelled, expired and fenced ids among the held ones; what is not held goes back."""
        node.is_silent = False
        running = self.running(node.name)
        cancelled = {j.job_id for j in running if j.job_id in held and j.is_cancelled}
        expired = {j.job_id for j in running if j.job_id in held and j.is_past_deadline} - cancelled
        for job in running:
            if job.job_id not in held and not self.end_if_over(job):
                self._requeue(job)
        return cancelled, expired, set(held) - {j.job_id for j in running}

    def sweep(self) -> None:
        for job in [j for priority in range(3) for j in self.queued(priority)]:
            if job.is_past_deadline:
                self.end_if_over(job)
        for node in self.nodes.values():
            if node.is_known and node.is_silent:
                node.is_known = False
                for job in self.running(node.name):
                    self._lose(job)

    def _lose(self, job: ModelJob) -> None:
        if len(job.log) - job.mark >= PROGRESS_CHUNKS:
            job.losses = 0
        elif job.node not in job.lost_nodes:
            job.losses += 1
        job.mark = len(job.log)
        job.lost_nodes.add(job.node)
        if job.losses >= MAX_LOSSES:
            job.end("failed", "node_lost")
        elif not self.end_if_over(job):
            self._requeue(job)
