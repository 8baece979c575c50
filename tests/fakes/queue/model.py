"""The queue in plain lists, without Redis. The state machine test compares the scripts with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from penstock.contract.output import Usage
from penstock.contract.priority import NUM_LEVELS
from penstock.queue.policy import DUE, TURN, PolicyConfig, choose
from penstock.queue.policy_state import PolicyState
from penstock.queue.wire import decode_chunks

PROGRESS_CHUNKS = 4
MAX_LOSSES = 3
MAX_PREEMPTIONS = 3
MAX_PAST_LEASES = 8
ISOLATED = "isolated"
SHARE_WINDOW_MS = 10**12
"""So long that no run crosses from one window into the next."""
KV_TOTAL = 300
SLOTS_TOTAL = 8
TERMINAL = ("succeeded", "failed", "cancelled", "expired", "dead")


@dataclass
class ModelNode:
    """A node. `is_known`: it has joined; `is_silent`: its last heartbeat is older than a lease."""

    name: str
    revision: str
    is_known: bool = True
    is_silent: bool = False
    is_draining: bool = False
    call: int = 0
    answer: list[tuple[ModelJob, str]] = field(default_factory=list)


@dataclass(eq=False)
class ModelJob:
    """A job and every value that a script's decision about it depends on."""

    job_id: str
    tenant: str
    level: int
    n: int
    cost: int
    needs_reader: bool
    has_deadline: bool
    weight: float = 1.0
    is_later: bool = False
    is_up: bool = True
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
    past_leases: list[tuple[str, str]] = field(default_factory=list)
    """Node and reason of each lease that ended before the job did."""
    avoids: str = ""
    lacks: set[str] = field(default_factory=set)
    """Nodes that returned it for want of its adapter."""
    is_back: bool = False
    usage: Usage | None = None
    """Tokens that its end counted."""
    charge: float = 0.0
    urgency: int = 0
    waits_as: str = ""

    @property
    def remaining_cost(self) -> int:
        """The job's cost without the output tokens that its last chunk reports for each choice."""
        last = decode_chunks(self.log[-1])[-1] if self.log else None
        done = last.position + len(last.token_ids) if last and last.token_ids else 0
        return max(1, self.cost - done * self.n)

    @property
    def is_dead(self) -> bool:
        return self.code == "node_lost"

    @property
    def is_suspect(self) -> bool:
        return 0 < self.losses >= MAX_LOSSES - 1 and len(self.log) - self.mark < PROGRESS_CHUNKS

    @property
    def shown_state(self) -> str:
        """The state that callers see."""
        if self.state == "queued" and self.is_later:
            return "scheduled"
        return "cancelling" if self.state == "running" and self.is_cancelled else self.state

    def is_held(self, node: str, lease: str) -> bool:
        return self.state == "running" and (self.node, self.lease) == (node, lease)

    def end(self, state: str, code: str, usage: Usage | None = None) -> None:
        self.state, self.code = state, code
        logged = sum(len(chunk.token_ids) for data in self.log for chunk in decode_chunks(data))
        self.usage = usage or Usage(0, logged)

    @property
    def is_over(self) -> bool:
        return self.is_cancelled or self.is_past_deadline or (self.is_unread and self.needs_reader)

    def end_if_over(self) -> bool:
        if self.is_cancelled:
            self.end("cancelled", "cancelled")
        elif self.is_past_deadline:
            self.end("expired", "deadline_exceeded")
        elif self.is_unread and self.needs_reader:
            self.end("cancelled", "unread")
        return self.state in TERMINAL

    def requeue(self, why: str) -> None:
        self.past_leases.append((self.node, why))
        self.state, self.node, self.lease, self.avoids, self.is_back = "queued", "", "", "", True

    def append(self, index: int, chunks: list[bytes]) -> None:
        self.log += chunks[len(self.log) - index :]


@dataclass
class _Look:
    """One `take` of a node: the jobs that fit, and the job for which the node drains."""

    room: list[int]
    slots: list[int]
    num_running: int
    held_by_others: set[str]
    taken: list[ModelJob] = field(default_factory=list)
    made_room_for: str = ""

    @property
    def is_over(self) -> bool:
        """Whether the node has just taken a job that must run alone."""
        return any(job.is_suspect for job in self.taken)

    def fits(self, job: ModelJob, urgency: int) -> bool:
        need, places = min(job.cost, KV_TOTAL), min(job.n, SLOTS_TOTAL)
        must_wait = job.is_suspect and bool(self.num_running + len(self.taken))
        job.waits_as = ISOLATED if must_wait else job.job_id
        room_of = NUM_LEVELS - 1 if urgency == DUE else urgency
        if self.is_over or must_wait or need > self.room[room_of] or places > self.slots[room_of]:
            return False
        urgency = max(0, urgency)
        for lower in range(urgency, NUM_LEVELS):
            self.room[lower] -= need
            self.slots[lower] -= places
        job.urgency = urgency
        self.taken.append(job)
        return True

    def reserves(self, job: ModelJob) -> bool:
        if not self.is_over:
            if job.waits_as in self.held_by_others:
                return False
            self.made_room_for = job.waits_as
        return True


class QueueModel:
    """Each method returns what the script must answer, and changes the state as the script must."""

    def __init__(self, policy: PolicyConfig, now_ms: int) -> None:
        self.policy = policy
        self.now_ms = now_ms
        self.standing = PolicyState(policy.share_window_ms)
        self.jobs: dict[str, ModelJob] = {}
        self.nodes: dict[str, ModelNode] = {}
        self.holds: dict[str, str] = {}
        """By node: the job that the node empties itself for, by id, or any isolated job."""

    @property
    def used(self) -> dict[str, int]:
        """Return ended jobs and their tokens per tenant, in the form of P:usage."""
        counts = Counter[str]()
        for job in self.jobs.values():
            if job.usage is not None:
                name = f"{job.tenant}::"
                counts.update({name + "jobs": 1, name + "prompt": job.usage.prompt_tokens})
                counts.update(
                    {name + "completion": job.usage.completion_tokens, name + "cached": job.usage.cached_tokens}
                )
        return {name: count for name, count in counts.items() if count}

    def queued(self, level: int) -> list[ModelJob]:
        jobs = (j for j in self.jobs.values() if j.state == "queued" and j.level == level and not j.is_later)
        return sorted(jobs, key=_age)

    def running(self, node: str) -> list[ModelJob]:
        jobs = [j for j in self.jobs.values() if j.state == "running" and j.node == node]
        return sorted(jobs, key=_age)

    def submit(self, job: ModelJob) -> None:
        self.jobs[job.job_id] = job
        if not job.is_later:
            self.standing.virtual_times[job.level].enter(job.tenant)

    def release_delayed(self) -> None:
        """Move jobs whose time has come into the queue."""
        later = [j for j in self.jobs.values() if j.state == "queued" and j.is_later and j.is_up]
        for job in sorted(later, key=_age):
            job.is_later, job.is_back = False, True
            self.standing.virtual_times[job.level].enter(job.tenant)

    def take(
        self, node: ModelNode, room: list[int], slots: list[int], hold_ms: float, *, background_due: bool = False
    ) -> list[ModelJob]:
        """Return the jobs that the node gets, in order. The caller fills in their leases."""
        self.release_delayed()
        running = self.running(node.name)
        queued = [job for level in range(NUM_LEVELS) for job in self.queued(level) if not job.is_over]
        ours = [j for j in queued if j.avoids != node.name and (not j.log or j.revision == node.revision)]
        ours = [j for j in ours if node.name not in j.lacks or not self._others(j, j.lacks)]
        for job in ours:
            job.charge = job.cost * hold_ms / job.weight if self.policy.charges_use else TURN
        held_by_others = {name for other, name in self.holds.items() if other != node.name}
        look = _Look(room, slots, len(running), held_by_others)
        if not (len(running) == 1 and running[0].is_suspect):
            choose(
                *(ours, self.policy, self.standing, self.now_ms, look.fits, look.reserves),
                background_due=background_due,
            )
        self.holds.pop(node.name, None)
        if look.made_room_for:
            self.holds[node.name] = look.made_room_for
        for job in look.taken:
            job.state, job.node, job.revision, job.is_back = "running", node.name, node.revision, False
            self._leave_turn(job)
        return look.taken

    def _leave_turn(self, job: ModelJob) -> None:
        if job.tenant not in {other.tenant for other in self.queued(job.level)}:
            self.standing.virtual_times[job.level].leave(job.tenant)

    def end_if_over(self, job: ModelJob) -> bool:
        was_queued = job.state == "queued" and not job.is_later
        if not job.end_if_over():
            return False
        if was_queued:
            self._leave_turn(job)
        return True

    def _requeue(self, job: ModelJob, why: str) -> None:
        job.requeue(why)
        self.standing.virtual_times[job.level].enter(job.tenant)
        self.standing.correct(job.level, job.tenant, -job.charge, self.now_ms, self.now_ms)

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
        return "UNREAD" if job.is_unread and job.needs_reader else "OK"

    def finish(
        self,
        job: ModelJob,
        node: ModelNode,
        lease: str,
        index: int,
        chunks: list[bytes],
        kv_token_ms: float | None,
        usage: Usage | None = None,
    ) -> str:
        if job.state in TERMINAL and (job.node, job.lease) == (node.name, lease):
            return "OK"
        if not job.is_held(node.name, lease):
            return "FENCED"
        if index > len(job.log):
            return f"NEED {len(job.log)}"
        job.append(index, chunks)
        job.end("succeeded", "", usage)
        if kv_token_ms is not None and self.policy.charges_use:
            self.standing.correct(
                job.level, job.tenant, kv_token_ms / job.weight - job.charge, self.now_ms, self.now_ms
            )
        return "OK"

    def _others(self, job: ModelJob, lacks: set[str]) -> bool:
        """Whether another node may have what the nodes in `lacks` do not have."""
        able = [n for n in self.nodes.values() if n.is_known and not n.is_draining and n.name not in lacks]
        return any(not job.log or node.revision == job.revision for node in able)

    def return_for_want_of_adapter(self, job: ModelJob, node: ModelNode, lease: str, cost: int) -> str:
        if not job.is_held(node.name, lease):
            return "FENCED"
        if self.end_if_over(job):
            return "OK"
        lacks = {name for name in job.lacks if self.nodes[name].is_known} | {node.name}
        if not self._others(job, lacks):
            return "KEEP"
        self._requeue(job, "lacking")
        job.cost, job.avoids, job.lacks = cost, node.name, lacks
        return "OK"

    def give_back(
        self, job: ModelJob, node: ModelNode, lease: str, cost: int, most: int = 0, roomy: Collection[str] | None = None
    ) -> str:
        """`roomy`: the nodes with capacity for another job of 500 tokens; None if the caller does not ask."""
        if not job.is_held(node.name, lease):
            return "FENCED"
        if self.end_if_over(job):
            return "OK"
        if job.preemptions + 1 >= MAX_PREEMPTIONS:
            cost = max(cost, most)
        if roomy is not None:
            others = [self.nodes[name] for name in roomy if name != node.name]
            able = [other for other in others if other.revision == job.revision or not job.log]
            if not able or cost > 500 or job.n > SLOTS_TOTAL:
                return "KEEP"
        self._requeue(job, "drain" if roomy is None else "pressure")
        job.cost, job.avoids = cost, node.name
        job.preemptions += 1
        return "OK"

    def cancel(self, job: ModelJob) -> str:
        if job.state not in TERMINAL:
            job.is_cancelled = True
            if job.state == "queued":
                self.end_if_over(job)
        return job.shown_state

    def heartbeat(self, node: ModelNode, held: Iterable[str]) -> tuple[set[str], set[str], set[str]]:
        """Return the cancelled, expired and fenced ids among the held ones. Jobs that are not held are requeued."""
        node.is_silent = False
        running = self.running(node.name)
        cancelled = {j.job_id for j in running if j.job_id in held and j.is_cancelled}
        expired = {j.job_id for j in running if j.job_id in held and j.is_past_deadline} - cancelled
        for job in running:
            if job.job_id not in held and not self.end_if_over(job):
                self._requeue(job, "unlisted")
        return cancelled, expired, set(held) - {j.job_id for j in running}

    def sweep(self) -> None:
        due = [j for j in self.jobs.values() if j.state == "queued" and j.is_past_deadline]
        for node in self.nodes.values():
            if node.is_known and node.is_silent:
                node.is_known = False
                self.holds.pop(node.name, None)
                for job in self.running(node.name):
                    self._lose(job, node)
        for job in due:
            self.end_if_over(job)
        self.release_delayed()

    def _lose(self, job: ModelJob, node: ModelNode) -> None:
        if not node.is_draining:
            if len(job.log) - job.mark >= PROGRESS_CHUNKS:
                job.losses, job.lost_nodes = 0, {node.name}
            elif job.node not in job.lost_nodes:
                job.losses += 1
                job.lost_nodes.add(node.name)
            job.mark = len(job.log)
        if job.losses >= MAX_LOSSES:
            job.end("dead", "node_lost")
        elif not self.end_if_over(job):
            self._requeue(job, "lost")


def _age(job: ModelJob) -> tuple[int, str]:
    return job.submitted_ms, job.job_id
