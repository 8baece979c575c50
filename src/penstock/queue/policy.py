"""Scheduling policies: the order in which queued work starts, and the order in which running work is preempted.

The functions are pure; time is an argument. take.lua implements the same order in Lua, and a test through a real Redis
compares the two. The engine and the simulator order their own queues with these functions.

*Levels.* A caller waits for foreground work, and no caller waits for background work. All foreground work goes before
all background work, so a job's level is its class, plus the number of classes for background work. Within a kind of
work, `fcfs` considers age only. The other policies serve class by class, most urgent first. Within a class they serve

    priority   the oldest job
    sjf        the job with the lowest predicted remaining cost: an estimate that shrinks as its output grows
    fair       the oldest job of the tenant with the lowest virtual time (`VirtualTimes`)
    round_robin  the same, but each start advances the tenant's virtual time by one turn, whatever the job costs and
                 whatever the tenant's weight is. So tenants with queued work start one job each in turn. Inside an
                 engine, steps that are too small for all sequences deal their tokens to them in turns.

*Aging.* The head of a class of foreground work is its oldest job; under `fair`
and `round_robin`, the job that would start next. It
counts as one class more urgent for each `aging_ms` since it was submitted, or since the class's last head started,
whichever is later. So no class starves. Each start resets the clock, so a backlog of a day does not become the most
urgent work.

*Background.* Background work does not age. Instead, while it had less than its share of the engine's time, its next job
goes before everything else (`background_due`). Its classes share that by weight (`BackgroundTurns`). Such a job
displaces nothing, and from then on counts as the most urgent, so that nothing displaces it.

*Shares.* Under `fair`, class 0 goes before class 1 only while its tenant is within its share. A tenant is above its
share if its use in this and the last window of `share_window_ms` exceeds the mean of all tenants with queued work. Use
is the charge that virtual times count: predicted KV-token-milliseconds ÷ weight at each start, corrected at the end.
Class 0 of a tenant above its share counts as class 1 and follows the class 1 jobs. A tenant may have the only queued
work and still be above the mean of all tenants with recent use. Its class 0 then goes first, but counts as class 1, so
it cannot preempt the other tenants' running work. The result: a tenant at the highest class cannot keep
another tenant below half of its fair share for longer than two windows plus the jobs that were running then. Class 2 is
not protected; it is less urgent by its sender's choice.

*Bypass.* Other jobs may overtake a job that does not fit until it is `bypass_ms` old. Then one node of the pool keeps
capacity free for it and starts no job behind it. The other nodes continue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

from penstock.contract.priority import NUM_LEVELS, NUM_PRIORITIES, is_background
from penstock.queue.policy_state import SHARE_WINDOW_MS, PolicyState, Shares, VirtualTimes

PolicyName = Literal["fcfs", "priority", "sjf", "fair", "round_robin"]
_BY_VIRTUAL_TIME: tuple[PolicyName, ...] = ("fair", "round_robin")
TURN = 1e6
"""What a start charges under `round_robin`. A tenant that enters advances the virtual clock by 1, so a million may
enter during one turn."""
LEAST_URGENT = NUM_LEVELS - 1
DUE = -1
"""The urgency of background work that is due: it needs free capacity, as the least urgent work does, and then counts
as 0."""
_BATCH = NUM_PRIORITIES - 1
MAX_PASSED = 16
"""A scan of the queue ends after this many jobs that did not fit and were overtaken."""


class Candidate(Protocol):
    """A waiting job or sequence, with the properties that the order depends on."""

    @property
    def job_id(self) -> str:
        """The id, which breaks ties."""

    @property
    def tenant(self) -> str:
        """The tenant that is charged for it."""

    @property
    def level(self) -> int:
        """The level of the job's class and kind of work; 0 is the most urgent one."""

    @property
    def submitted_ms(self) -> float:
        """When it began to wait."""

    @property
    def cost(self) -> int:
        """Predicted KV tokens."""

    @property
    def remaining_cost(self) -> int:
        """Predicted KV tokens without the output tokens that it already has; equals `cost` while it has none."""

    @property
    def charge(self) -> float:
        """Predicted KV-token-milliseconds ÷ its tenant's weight, by which its tenant's virtual time advances."""


class RunningJob(Protocol):
    """A running job or sequence."""

    @property
    def urgency(self) -> int:
        """The level that it counted as when it started; it differs from its own level after aging, or by shares."""


C = TypeVar("C", bound=Candidate)
R = TypeVar("R", bound=RunningJob)


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """A pool's policy and its time constants; all nodes of the pool must agree on them."""

    name: PolicyName = "fcfs"
    aging_ms: int = 60_000
    bypass_ms: int = 2_000
    share_window_ms: int = SHARE_WINDOW_MS

    def charge_of(self, candidate: Candidate) -> float:
        """Return what its tenant is charged when a candidate starts."""
        return candidate.charge if self.charges_use else TURN

    @property
    def charges_use(self) -> bool:
        """Whether a charge is corrected to what a job used, when it ends."""
        return self.name != "round_robin"


def choose(
    waiting: Iterable[C],
    policy: PolicyConfig,
    state: PolicyState,
    now_ms: float,
    fits: Callable[[C, int], bool],
    reserves: Callable[[C], bool] = lambda _: True,
    *,
    background_due: bool = False,
) -> list[C]:
    """Return the candidates to start now, in order, and charge their tenants.

    `fits(candidate, urgency)` returns whether the candidate fits if it counts as level `urgency`, and then reserves its
    capacity. `reserves(candidate)` is called for a candidate that does not fit and is too old to be overtaken. It
    returns False if another node keeps capacity free for that candidate, so that the scan continues. The tenants of
    `waiting` must have entered `state.virtual_times`. `background_due`: whether background work had less than its share
    of the engine's time.
    """
    waiting = list(waiting)
    chosen: list[C] = []
    num_passed = 0
    due = _due_background(waiting, policy, state) if background_due else None
    for candidate, urgency, is_head in _in_order(waiting, policy, state, now_ms, due):
        if fits(candidate, urgency):
            chosen.append(candidate)
            if candidate is due:
                state.background_turns.start(candidate.level, candidate.cost)
            state.start(candidate.level, candidate.tenant, policy.charge_of(candidate), now_ms)
            if is_head:
                state.head_served_ms[candidate.level] = now_ms
            continue
        if now_ms - candidate.submitted_ms >= policy.bypass_ms:
            if reserves(candidate):
                break
            continue
        num_passed += 1
        if num_passed >= MAX_PASSED:
            break
    return chosen


def foremost(waiting: Iterable[C], policy: PolicyConfig, state: PolicyState, now_ms: float) -> tuple[C, int] | None:
    """Return the first candidate in the policy's order and the level it counts as; None if `waiting` is empty."""
    first = next(_in_order(list(waiting), policy, state, now_ms), None)
    return first[:2] if first is not None else None


def preemption_order(running: Sequence[R], remaining: Callable[[R], int] = lambda _: 0) -> list[R]:
    """Return the running jobs in order of preemption: least urgent first, then newest. `running` is oldest first.

    `sjf` gives `remaining`, the output tokens that a job still lacks: of equally urgent jobs, the longest goes first.
    """
    return sorted(running, key=lambda one: (one.urgency, remaining(one)))[::-1]


def victims_of(urgency: int, running: Sequence[R], remaining: Callable[[R], int] = lambda _: 0) -> list[R]:
    """Return the running jobs that a job of class `urgency` may preempt, in order: only less urgent ones."""
    return [one for one in preemption_order(running, remaining) if one.urgency > urgency]


def _in_order(
    waiting: list[C], policy: PolicyConfig, state: PolicyState, now_ms: float, due: C | None = None
) -> Iterator[tuple[C, int, bool]]:
    """Yield (candidate, level it counts as, whether it is the head of its class, which aging may raise).

    The caller charges a started candidate to `state` before it asks for the next one.
    """
    if due is not None:
        yield due, DUE, False
        waiting = [one for one in waiting if one is not due]
    if policy.name == "fcfs":
        yield from ((one, _last_level_of_kind(one), False) for one in sorted(waiting, key=_kind_and_age))
        return
    levels: list[list[C]] = [[] for _ in range(NUM_LEVELS)]
    for one in waiting:
        levels[one.level].append(one)
    queues = [_LevelQueue(members, policy, state.virtual_times[level]) for level, members in enumerate(levels)]
    heads = [queue.head() for queue in queues[:NUM_PRIORITIES]]
    risen = _risen(heads, policy, state, now_ms)
    shares = state.shares(now_ms) if policy.name == "fair" and levels[0] else None
    while (found := _next_of(queues, risen, shares)) is not None:
        one, urgency = found
        yield one, urgency, not is_background(one.level) and one is heads[one.level]


def _due_background(waiting: list[C], policy: PolicyConfig, state: PolicyState) -> C | None:
    """Return the background job that goes before everything else; None if none waits."""
    levels = {one.level for one in waiting if is_background(one.level)}
    if not levels:
        return None
    level = state.background_turns.next_of(levels)
    members = [one for one in waiting if one.level == level]
    return _LevelQueue(members, policy, state.virtual_times[level]).take()


def _next_of(
    queues: list[_LevelQueue[C]], risen: list[tuple[float, int, C]], shares: Shares | None
) -> tuple[C, int] | None:
    """Return the next candidate and the level it counts as; None if none is left.

    Interactive work of tenants above their share follows standard work. This is decided anew for each candidate,
    because each started one changes the shares.
    """
    interactive, standard, batch, *background = queues

    def risen_to(p: int) -> C | None:
        if not risen or risen[0][0] > p:
            return None
        head = risen.pop(0)[2]
        queues[head.level].remove(head)
        return head

    if (one := risen_to(0)) is not None:
        return one, 0
    if (one := interactive.take(shares.goes_first if shares else None)) is not None:
        return one, int(shares is not None and not shares.may_displace(one.tenant))
    if (one := risen_to(1) or standard.take() or interactive.take()) is not None:
        return one, 1
    if (one := risen_to(2) or batch.take()) is not None:
        return one, _BATCH
    return next(((one, one.level) for queue in background if (one := queue.take()) is not None), None)


def _risen(
    heads: list[C | None], policy: PolicyConfig, state: PolicyState, now_ms: float
) -> list[tuple[float, int, C]]:
    """Return (level, -class, head) of the heads whose age has raised them above their class, most urgent first."""
    risen = []
    for p, head in enumerate(heads):
        if head is not None:
            since_ms = max(head.submitted_ms, state.head_served_ms[p])
            level = p - max(0, now_ms - since_ms) // policy.aging_ms
            if level < p:
                risen.append((level, -p, head))
    return sorted(risen, key=lambda one: one[:2])


class _LevelQueue(Generic[C]):
    """The waiting candidates of one level, in the policy's order.

    Under `fair` and `round_robin` it holds one queue per tenant, because virtual times may change during the scan.
    """

    def __init__(self, members: list[C], policy: PolicyConfig, virtual_times: VirtualTimes) -> None:
        self._virtual_times = virtual_times if policy.name in _BY_VIRTUAL_TIME else None
        # Keyed by tenant; no text of a request.
        self._queues: dict[str, deque[C]] = {}
        by_cost = policy.name == "sjf"
        for one in sorted(members, key=lambda one: (one.remaining_cost, *_age(one)) if by_cost else _age(one)):
            self._queues.setdefault(one.tenant if self._virtual_times else "", deque()).append(one)
        self._head = min(members, key=_age, default=None) if by_cost else self._first(_any_tenant)

    def head(self) -> C | None:
        """Return the head of the level, which aging may raise if it is a class of foreground work."""
        return self._head

    def take(self, may: Callable[[str], bool] | None = None) -> C | None:
        """Remove and return the next candidate; under `fair`
        and `round_robin`, the next one of a tenant for which `may` holds.
        """
        one = self._first(may or _any_tenant)
        if one is not None:
            self.remove(one)
        return one

    def remove(self, one: C) -> None:
        """Remove a candidate from its queue."""
        name = one.tenant if self._virtual_times else ""
        self._queues[name].remove(one)
        if not self._queues[name]:
            del self._queues[name]

    def _first(self, may: Callable[[str], bool]) -> C | None:
        if self._virtual_times is None:
            return self._queues[""][0] if self._queues else None
        times = self._virtual_times.times
        in_turn = sorted(self._queues, key=lambda name: (times[name], name))
        return next((self._queues[name][0] for name in in_turn if may(name)), None)


def _any_tenant(tenant: str) -> bool:
    return True


def _age(one: Candidate) -> tuple[float, str]:
    return one.submitted_ms, one.job_id


def _last_level_of_kind(one: Candidate) -> int:
    return LEAST_URGENT if is_background(one.level) else _BATCH


def _kind_and_age(one: Candidate) -> tuple[int, tuple[float, str]]:
    return _last_level_of_kind(one), _age(one)
