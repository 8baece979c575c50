"""Any order of calls, lost replies and deaths: the scripts do what the model does, and no key is ever wrong.

HYPOTHESIS_PROFILE=full runs many more and longer examples.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from typing import Any, TypeVar, cast

import pytest
import redis as sync_redis
from fakes.queue.check import check_jobs, check_lives, check_owned, check_policy, check_sets, dump
from fakes.queue.harness import POOL, FakeNode, P, Queue, new_job
from fakes.queue.model import (
    KV_TOTAL,
    MAX_LOSSES,
    PROGRESS_CHUNKS,
    SHARE_WINDOW_MS,
    SLOTS_TOTAL,
    TERMINAL,
    ModelJob,
    ModelNode,
    QueueModel,
)
from hypothesis import HealthCheck, settings, stateful
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.contract.errors import ConflictError, InvariantError
from penstock.contract.job import MAX_DEADLINE_S, JobDef, Priority, SamplingParams
from penstock.contract.output import Chunk, Outcome, Usage
from penstock.contract.pool import NodePressure
from penstock.contract.priority import NUM_LEVELS
from penstock.contract.tenant import Terms
from penstock.queue.broker.admin import AdminBroker
from penstock.queue.broker.audit import audit
from penstock.queue.broker.connection import connect
from penstock.queue.broker.node import Emission, LeaseLostError, Taken
from penstock.queue.broker.producer import Submission
from penstock.queue.policy import PolicyConfig, PolicyName
from penstock.queue.wire import encode_chunk, encode_record

T = TypeVar("T")
FULL = os.environ.get("HYPOTHESIS_PROFILE") == "full"
LEASE_MS = 1_000_000  # longer than an example runs: nodes die when they are told to
FOREVER_MS = 500_000_000
AGING_MS = 1_000_000_000
"""Times that decide about the order lie so far apart that no run is long enough to move them."""
CONFIG = {
    "lease_ms": LEASE_MS,
    "avoid_ms": FOREVER_MS,
    "max_losses": MAX_LOSSES,
    "progress_chunks": PROGRESS_CHUNKS,
    "reattach_grace_ms": FOREVER_MS,
    "abandon_after_ms": FOREVER_MS,
    "share_window_ms": SHARE_WINDOW_MS,
}
NODES = {"n0": "r1", "n1": "r1", "n2": "r1", "n3": "r2"}
node_names = st.sampled_from(sorted(NODES))
picks = st.integers(0, 1000)


class QueueMachine(RuleBasedStateMachine):
    """Drives scripts and model side by side."""

    url: str

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.sync = sync_redis.Redis.from_url(self.url)
        self.sync.flushall()
        self.client = connect(self.url)
        self.queue = Queue(self.client)
        self.model = QueueModel(PolicyConfig(), 0)
        self.nodes: dict[str, FakeNode] = {}
        self.requests: list[JobDef] = []
        self.handles: list[tuple[str, Taken]] = []  # every lease ever given, with its node's name
        self.records: dict[str, dict[bytes, bytes]] = {}  # terminal records as they were first seen

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(call)

    def teardown(self) -> None:
        # Results are no results here.
        found = [f for f in self.run(audit(AdminBroker(self.client), POOL)) if f.name != "unreadable"]
        self.run(self.client.aclose())
        self.runner.close()
        self.sync.close()
        assert found == []

    def job(self, pick: int) -> ModelJob:
        return list(self.model.jobs.values())[pick % len(self.model.jobs)]

    def handle(self, pick: int) -> tuple[ModelJob, FakeNode, Taken]:
        name, taken = self.handles[-1 - pick % len(self.handles)]
        return self.model.jobs[taken.job_id], self.nodes[name], taken

    def node(self, pick: int) -> tuple[FakeNode, ModelNode]:
        node = list(self.nodes.values())[pick % len(self.nodes)]
        return node, self.model.nodes[node.name]

    @staticmethod
    def chunks(taken: Taken, index: int, count: int) -> list[bytes]:
        """Return chunks that name their lease."""
        return [
            encode_chunk(Chunk(taken.job_id, i, 0, sum(k % 3 for k in range(i)), (i,) * (i % 3), f"{taken.lease} {i}"))
            for i in range(index, index + count)
        ]

    @initialize(name=st.sampled_from(("fcfs", "priority", "sjf", "fair")), bypass_ms=st.sampled_from((0, 24, 10**6)))
    def start(self, name: PolicyName, bypass_ms: int) -> None:
        """Most of what can happen needs a node and jobs."""
        self.model = QueueModel(
            PolicyConfig(name, AGING_MS, bypass_ms * AGING_MS, SHARE_WINDOW_MS), self.run(self.queue.now_ms())
        )
        for node in ("n0", "n1", "n2"):
            self.join(node)
        for cost in (10, 120, 10, 200):
            self.submit("a", Priority.STANDARD, 1, cost, cost != 120, cost == 10)

    # Producers

    @rule(
        tenant=st.sampled_from("ab"),
        priority=st.sampled_from(Priority),
        n=st.sampled_from((1, 1, 2, 16)),
        cost=st.sampled_from((10, 50, 120, 900)),
        needs_reader=st.booleans(),
        deadline=st.booleans(),
        weight=st.sampled_from((1.0, 4.0, 0.3)),
        later=st.sampled_from((False, False, True)),
        background=st.booleans(),
    )
    def submit(
        self,
        tenant: str,
        priority: Priority,
        n: int,
        cost: int,
        needs_reader: bool,
        deadline: bool,
        weight: float = 1.0,
        later: bool = False,
        background: bool = False,
    ) -> None:
        kind = {"background": background, "needs_reader": needs_reader}
        fields = {"tenant": tenant, "priority": priority, "params": SamplingParams(n=n), **kind}
        times = {
            "deadline_ms": 1000 * MAX_DEADLINE_S if deadline else None,
            "not_before_ms": FOREVER_MS // 2 if later else None,
        }
        job = new_job(**fields, **times)
        assert not self.run(
            self.queue.producer.submit(Submission(job, cost, terms=Terms(weight=weight)), inbox="me")
        ).existed
        known = ModelJob(job.id, tenant, job.level, n, cost, needs_reader, deadline, weight, later, is_up=not later)
        # Not Redis's clock: jobs of one millisecond would have no order that the next run repeats.
        known.submitted_ms = self.model.now_ms - 25 * AGING_MS + len(self.requests) * AGING_MS // 4 - AGING_MS // 8
        if not later:
            self.sync.hset(f"{P}:job:{job.id}", "submitted", known.submitted_ms)
            self.sync.zadd(f"{P}:waiting:{job.level}", {job.id: known.submitted_ms})
        self.model.submit(known)
        self.requests.append(job)

    @rule(pick=picks, how=st.sampled_from(("same", "other", "attach")))
    def ask_again(self, pick: int, how: str) -> None:
        request = self.requests[pick % len(self.requests)]
        job = self.model.jobs[request.id]
        if how == "other":
            with pytest.raises(ConflictError):
                self.run(self.queue.producer.submit(Submission(request.model_copy(update={"prompt": "other"}), 1)))
        elif how == "same":
            submitted = self.run(self.queue.producer.submit(Submission(request, 1)))
            assert (submitted.existed, submitted.state) == (True, job.shown_state)
        else:
            answer = self.run(self.queue.producer.attach(job.job_id, job.tenant, inbox="me"))
            assert (answer.state, answer.num_chunks) == (job.shown_state, len(job.log) + (job.state in TERMINAL))
            job.is_unread = False

    @rule(pick=picks)
    def cancel(self, pick: int) -> None:
        job = self.job(pick)
        assert self.run(self.queue.producer.cancel(job.job_id, job.tenant)) == self.model.cancel(job)

    @rule(pick=picks, what=st.sampled_from(("deadline", "unread", "avoid", "not_before")))
    def time_passes(self, pick: int, what: str) -> None:
        """A deadline passes, a job's time comes, the last reader is gone, or a node was avoided for long enough."""
        later = [place for place, job in enumerate(self.model.jobs.values()) if job.is_later and not job.is_up]
        job = self.job(later[pick % len(later)] if later and what == "not_before" else pick)
        key = f"{P}:job:{job.job_id}"
        if what == "unread":
            self.run(self.queue.producer.detach(job.job_id, "me"))
        if job.state in TERMINAL:
            return
        if what == "deadline" and job.has_deadline:
            job.is_past_deadline = True
            self.sync.hset(key, "deadline", 1)
            self.sync.zadd(f"{P}:deadlines", {job.job_id: 1}, xx=True)
        elif what == "unread":
            job.is_unread = True
            self.sync.hset(key, "unread", 1)
        elif what == "avoid":
            job.avoids = ""
            self.sync.hset(key, "avoid_until", 0)
        elif what == "not_before" and job.is_later:
            job.is_up = True
            self.sync.hset(key, "submitted", job.submitted_ms)
            lane = f"{job.level}:{job.tenant}"
            self.sync.zadd(f"{P}:delayed:{lane}", {job.job_id: job.submitted_ms}, xx=True)
            self.sync.zadd(f"{P}:delayed", {lane: 1}, xx=True)

    # Nodes

    @rule(name=node_names)
    def join(self, name: str) -> None:
        node = self.nodes.setdefault(name, FakeNode(self.client, name, NODES[name]))
        policy = self.model.policy
        self.run(node.join(**CONFIG, policy=policy.name, aging_ms=policy.aging_ms, bypass_ms=policy.bypass_ms))
        self.run(self.queue.note_sweep())
        known = self.model.nodes.setdefault(name, ModelNode(name, NODES[name]))
        known.is_known, known.is_silent, known.is_draining = True, False, False
        self.tell(node, free=0)

    @rule(priority=st.sampled_from(Priority), risen=st.integers(1, 4))
    def class_is_not_served_for_long(self, priority: Priority, risen: int) -> None:
        """Its head rises by this many classes, if it is old enough."""
        served_ms = self.model.now_ms - risen * AGING_MS - AGING_MS // 2
        self.model.standing.head_served_ms[priority] = served_ms
        self.sync.hset(f"{P}:head_served", str(int(priority)), served_ms)

    @rule(
        pick=picks,
        tokens=st.sampled_from((60, 300, 1000)),
        slots=st.integers(0, 20),
        hold_ms=st.sampled_from((1.0, 0.1, 2000.0)),
        due=st.booleans(),
    )
    def take(self, pick: int, tokens: int, slots: int, hold_ms: float, due: bool = False) -> None:
        node, known = self.node(pick)
        if not known.is_known:
            with pytest.raises(LeaseLostError):
                self.run(node.take())
            node.call -= 1
            return
        room = (tokens, *(tokens // 2,) * 3, *(tokens // 4,) * 2)
        answer = self.run(
            node.take(room, slots, kv_total=KV_TOTAL, slots_total=SLOTS_TOTAL, hold_ms=hold_ms, background_due=due)
        )
        expected = self.model.take(known, list(room), [slots] * NUM_LEVELS, hold_ms, background_due=due)
        self.heed_what_was_over()
        assert [(t.job_id, t.tenant, t.urgency, t.cost, t.losses, t.num_chunks) for t in answer.jobs] == [
            (job.job_id, job.tenant, job.urgency, job.cost, job.losses, len(job.log)) for job in expected
        ]
        assert answer.depth == tuple(len(self.model.queued(level)) for level in range(NUM_LEVELS))
        for job, taken in zip(expected, answer.jobs, strict=True):
            assert taken.lease not in {t.lease for _, t in self.handles}
            job.lease = taken.lease
            self.handles.append((node.name, taken))
        known.answer = [(job, job.lease) for job in expected]

    def heed_what_was_over(self) -> None:
        """Jobs that may not run any more end when take happens to look at them."""
        for job in self.model.jobs.values():
            if job.state == "queued" and job.is_over:
                state = cast(bytes, self.sync.hget(f"{P}:job:{job.job_id}", "state"))
                assert state == b"queued" or self.model.end_if_over(job)

    @rule(pick=picks)
    def reply_of_take_was_lost(self, pick: int) -> None:
        node, known = self.node(pick)
        if not known.is_known or not node.call:
            return
        answer = self.run(node.take_again(tokens=10**6))
        current = [job.job_id for job, lease in known.answer if job.is_held(node.name, lease)]
        assert [t.job_id for t in answer.jobs] == current
        if node.call > 1:
            node.call -= 1
            with pytest.raises(InvariantError, match="STALE"):
                self.run(node.take_again())
            node.call += 1

    @precondition(lambda self: self.handles)
    @rule(pick=picks, back=st.integers(-2, 3), count=st.integers(0, 3), times=st.integers(1, 2))
    def emit(self, pick: int, back: int, count: int, times: int) -> None:
        """A node, alive or a zombie, emits from where it believes the log to end; its reply may be lost."""
        job, node, taken = self.handle(pick)
        index = max(0, len(job.log) - back)
        chunks = job.log[index : index + count] if job.lease == taken.lease else []
        chunks += self.chunks(taken, index + len(chunks), count - len(chunks))
        emission = Emission(job.job_id, taken.lease, index, tuple(chunks))
        for _ in range(times):
            (answer,) = self.run(node.broker.emit([emission]))
            assert answer == self.model.emit(job, self.model.nodes[node.name], taken.lease, index, chunks)

    @precondition(lambda self: self.handles)
    @rule(
        pick=picks,
        ahead=st.sampled_from((0, 0, 0, 1)),
        count=st.integers(0, 2),
        times=st.integers(1, 2),
        kv_token_ms=st.sampled_from((None, 0.0, 7.5, 1e5)),
        usage=st.sampled_from((None, Usage(7, 100, 3), Usage(5, 0))),
    )
    def finish(
        self, pick: int, ahead: int, count: int, times: int, kv_token_ms: float | None, usage: Usage | None = None
    ) -> None:
        job, node, taken = self.handle(pick)
        index = len(job.log) + ahead
        chunks = self.chunks(taken, index, count)
        last = Emission(job.job_id, taken.lease, index, tuple(chunks))
        for _ in range(times):
            size = None if kv_token_ms is None else sum(map(len, job.log[:index] + chunks))
            call = node.broker.finish(
                last, Outcome("succeeded"), b"result", kv_token_ms=kv_token_ms, usage=usage, log_bytes=size
            )
            answer = self.run(call)
            known = self.model.nodes[node.name]
            assert answer == self.model.finish(job, known, taken.lease, index, chunks, kv_token_ms, usage)

    @precondition(lambda self: self.handles)
    @rule(pick=picks, cost=st.sampled_from((5, 70, 400)), roomy=st.none() | st.sets(node_names))
    def give_back(self, pick: int, cost: int, roomy: set[str] | None) -> None:
        """`roomy`: the nodes with capacity, if the job may only go to one of those."""
        job, node, taken = self.handle(pick)
        roomy = {name for name in roomy if name in self.nodes and self.model.nodes[name].is_known} if roomy else roomy
        for name, other in self.nodes.items() if roomy is not None else ():
            if self.model.nodes[name].is_known:
                self.tell(other, free=500 if name in (roomy or ()) else 0)
        answer = self.run(node.give_back(taken, cost, 450, why="drain" if roomy is None else "pressure"))
        known = self.model.nodes[node.name]
        assert answer == self.model.give_back(job, known, taken.lease, cost, 450, roomy)

    @precondition(lambda self: self.handles)
    @rule(pick=picks, cost=st.sampled_from((5, 70)))
    def return_for_want_of_adapter(self, pick: int, cost: int) -> None:
        job, node, taken = self.handle(pick)
        answer = self.run(node.give_back(taken, cost, why="lacking"))
        known = self.model.nodes[node.name]
        assert answer == self.model.return_for_want_of_adapter(job, known, taken.lease, cost)

    def tell(self, node: FakeNode, free: int) -> None:
        """Write a node's statistics as a heartbeat does."""
        self.sync.zadd(f"{P}:free", {node.name: free})
        draining = self.model.nodes[node.name].is_draining
        record = NodePressure(node.name, max_num_seqs=SLOTS_TOTAL, revision=node.revision, draining=draining)
        self.sync.hset(f"{P}:pressure", node.name, encode_record(record))

    @rule(pick=picks)
    def node_that_makes_room_does_not_call_for_long(self, pick: int) -> None:
        node, _ = self.node(pick)
        held = self.model.holds.pop(node.name, None)
        if held:
            self.sync.hset(f"{P}:reservations", node.name, f"{held} 1")

    @rule(pick=picks, forgets=st.sets(picks, max_size=2), claims=st.booleans())
    def heartbeat(self, pick: int, forgets: set[int], claims: bool) -> None:
        """A heartbeat with the held-ids check; the node may have lost jobs, or claim one that is not its own."""
        node, known = self.node(pick)
        held = [job.job_id for place, job in enumerate(self.model.running(node.name)) if place not in forgets]
        held += ["m.claimed"] if claims else []
        if not known.is_known:
            with pytest.raises(LeaseLostError):
                self.run(node.heartbeat(held))
            return
        answer = self.run(node.heartbeat(held, draining=known.is_draining))
        assert (set(answer.cancelled), set(answer.expired), set(answer.fenced)) == self.model.heartbeat(known, held)

    @rule(pick=picks, drains=st.sampled_from((False, False, True)), returns=st.booleans())
    def node_dies(self, pick: int, drains: bool, returns: bool) -> None:
        self.node_falls_silent(pick, drains)
        self.sweep()
        if returns:
            self.join(self.node(pick)[0].name)

    @rule(number=st.integers(1, 4), slots=st.integers(1, 20))
    def nodes_die_one_after_the_other(self, number: int, slots: int) -> None:
        for place in range(min(number, len(self.nodes))):
            self.take(place, 1000, slots, 1.0)
            self.node_dies(place, drains=False, returns=True)

    @rule(pick=picks, slots=st.integers(1, 20), count=st.integers(0, 6), ends=st.booleans())
    def node_works(self, pick: int, slots: int, count: int, ends: bool) -> None:
        """What it takes gets chunks, and perhaps an end."""
        num_known = len(self.handles)
        self.take(pick, 1000, slots, 2000.0)
        for place in range(len(self.handles) - num_known):
            self.emit(place, 0, count, 1)
            if ends:
                self.finish(place, 0, 1, 1, 7.5)

    @rule(pick=picks)
    def node_falls_silent(self, pick: int, drains: bool = False) -> None:
        node, known = self.node(pick)
        if known.is_known:
            known.is_draining = known.is_draining or drains
            self.tell(node, free=0)
            self.sync.zadd(f"{P}:nodes", {node.name: 1}, xx=True)
            known.is_silent = True

    @rule()
    def sweep(self) -> None:
        self.run(self.queue.sweep(since_last_ms=LEASE_MS // 4))
        self.model.sweep()

    @rule(is_wanted=st.sampled_from((False,) * 9 + (True,)))
    def everything_ends(self, is_wanted: bool) -> None:
        if not is_wanted:
            return
        for job in self.model.jobs.values():
            self.cancel(list(self.model.jobs).index(job.job_id))
        for pick in range(len(self.nodes)):
            self.node_falls_silent(pick)
        self.sweep()
        assert all(job.state in TERMINAL for job in self.model.jobs.values())

    # Invariants

    @invariant()
    def keys_are_right(self) -> None:
        found, lives = dump(self.sync)
        check_sets(found, self.model)
        check_policy(found, self.model)
        check_jobs(found, self.model)
        check_owned(found, self.model)
        check_lives(lives, self.model)
        for job_id, job in self.model.jobs.items():
            if job.state in TERMINAL:
                record = found[f"job:{job_id}"]
                assert self.records.setdefault(job_id, record) == record


@pytest.mark.timeout(1800 if FULL else 120)
def test_scripts_do_what_the_model_does(redis_url: str) -> None:
    examples, steps = (2000, 60) if FULL else (40, 40)
    stateful.run_state_machine_as_test(
        type("Machine", (QueueMachine,), {"url": redis_url}),
        settings=settings(max_examples=examples, stateful_step_count=steps, suppress_health_check=list(HealthCheck)),
    )


def test_charges_are_added_up_in_the_same_order(redis_url: str) -> None:
    """Charges that differ a lot, after refunds that leave a small rest: another order changes the last bit."""
    machine = type("Machine", (QueueMachine,), {"url": redis_url})()
    machine.start("sjf", 0)
    machine.submit("a", Priority.STANDARD, 1, 10, False, False, weight=0.3)
    machine.nodes_die_one_after_the_other(number=2, slots=5)
    machine.keys_are_right()
    machine.teardown()
