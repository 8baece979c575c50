"""In which order queued work is served and who gives way to it: fcfs, priority, sjf, fair. Pure; time is an argument.

take.lua says the same in Lua, and a test through a real Redis holds both equal. The engine orders its own lists and the
simulator its queue with what stands here.

`fcfs` looks at nothing but age. The others serve class by class, the most urgent one first, and inside a class

    priority   the oldest first
    sjf        the cheapest first, by predicted cost
    fair       the tenant whose turn it is (`Turns`), and of a tenant the oldest

*Aging.* The head of a class (its oldest; under fair the one whose turn it is) counts as one class higher for each
`aging_ms` since it was submitted or the class's last head was served, whichever is later: so a class is never starved,
and a backlog of a day, however old, does not turn into the most urgent work there is.

*Bypass.* One that does not fit may be passed by others until it is `bypass_ms` old; then whoever makes room for it
starts nobody who stands behind it. Of a pool's nodes one does that, and the others go on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeVar

from penstock.contract.priority import NUM_PRIORITIES

PolicyName = Literal["fcfs", "priority", "sjf", "fair"]
LEAST_URGENT = NUM_PRIORITIES - 1
MAX_PASSED = 16
"""In one look at the queue: so many that do not fit and are passed end it."""
MAX_DEBTS = 1000
"""Tenants whose debt is remembered: the largest debts of a class."""
HOLD_MS = 1000.0
"""How long a KV token of a job's cost is assumed to be held before any job has ended."""
_HOLD_WEIGHT = 0.05


class Candidate(Protocol):
    """What the order depends on."""

    @property
    def job_id(self) -> str:
        """Breaks ties."""

    @property
    def tenant(self) -> str:
        """Whose turn it takes."""

    @property
    def priority(self) -> int:
        """Class; 0 is the most urgent one."""

    @property
    def submitted_ms(self) -> float:
        """When it began to wait."""

    @property
    def cost(self) -> int:
        """Predicted KV tokens."""

    @property
    def charge(self) -> float:
        """Predicted KV-token-milliseconds ÷ its tenant's weight: what its tenant pays for it."""


class Running(Protocol):
    """One that has been started; `urgency` is the class that it was started as."""

    @property
    def urgency(self) -> int:
        """At most its own class, less when it had aged."""


C = TypeVar("C", bound=Candidate)
R = TypeVar("R", bound=Running)


@dataclass(frozen=True, slots=True)
class Policy:
    """A pool's choice; its nodes must agree on it."""

    name: PolicyName = "fcfs"
    aging_ms: int = 60_000
    bypass_ms: int = 2_000

    def longest_wait_ms(self, priority: int, num_before: int, turnover_ms: int) -> int:
        """The longest that one of this class waits with `num_before` before it in its class, whatever others send.

            (num_before + 1) × (rise × aging_ms + 3 × turnover_ms)

        `rise` is the classes its head has to rise to be the next one: as many as its class, under sjf at least one.
        `turnover_ms` is the longest until room for one job is free that nobody passes; risen heads of the other two
        classes may go first. Not for fcfs, where who came before is all there is.
        """
        rise = max(priority, 1) if self.name == "sjf" else priority
        return (num_before + 1) * (rise * self.aging_ms + 3 * turnover_ms)


class Turns:
    """Tenants of one class in virtual time: each start costs its tenant what it will probably use.

    `now` is the highest time at which anybody was started and never falls; it rises by one with each who enters, so
    that of newcomers the first is first. One who enters gets `now`, or what it owes from before: no credit from idling,
    no head start, no forgiven debt.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.times: dict[str, float] = {}
        """Of tenants with queued work."""
        self.debts: dict[str, float] = {}
        """Of tenants without, as far as they are ahead of `now`."""

    def enter(self, tenant: str) -> None:
        """A tenant has queued work."""
        if tenant not in self.times:
            self.times[tenant] = max(self.now, self.debts.pop(tenant, 0.0))
            self.now += 1

    def leave(self, tenant: str) -> None:
        """It has none any more."""
        self._owe(tenant, self.times.pop(tenant))

    def start(self, tenant: str, charge: float) -> None:
        """Work of a tenant with queued work is started."""
        if self.times[tenant] > self.now:
            self.now = self.times[tenant]
            self.debts = {name: time for name, time in self.debts.items() if time > self.now}
        self.times[tenant] += charge

    def correct(self, tenant: str, by: float) -> None:
        """What was charged was too little, or too much (negative)."""
        if tenant in self.times:
            self.times[tenant] += by
        else:
            self._owe(tenant, self.debts.pop(tenant, self.now) + by)

    def _owe(self, tenant: str, time: float) -> None:
        if time > self.now:
            self.debts[tenant] = time
        if len(self.debts) > MAX_DEBTS:
            del self.debts[min(self.debts, key=lambda name: self.debts[name])]


@dataclass(slots=True)
class Standing:
    """What is remembered from one look at the queue to the next, per class."""

    turns: list[Turns] = field(default_factory=lambda: [Turns() for _ in range(NUM_PRIORITIES)])
    head_served_ms: list[float] = field(default_factory=lambda: [0.0] * NUM_PRIORITIES)


def choose(
    waiting: Iterable[C],
    policy: Policy,
    standing: Standing,
    now_ms: float,
    fits: Callable[[C, int], bool],
    makes_room: Callable[[C], bool] = lambda _: True,
) -> list[C]:
    """Who is started now, in order. `fits` is asked with a candidate and the class it counts as, and holds its room.

    `makes_room` is asked with one that does not fit and is too old to be passed: False where somebody else makes room
    for it. Tenants of `waiting` have entered their turns; who is chosen is charged here.
    """
    chosen: list[C] = []
    num_passed = 0
    for candidate, urgency, is_head in _in_order(list(waiting), policy, standing, now_ms):
        if fits(candidate, urgency):
            chosen.append(candidate)
            standing.turns[candidate.priority].start(candidate.tenant, candidate.charge)
            if is_head:
                standing.head_served_ms[candidate.priority] = now_ms
            continue
        if now_ms - candidate.submitted_ms >= policy.bypass_ms:
            if makes_room(candidate):
                break
            continue
        num_passed += 1
        if num_passed >= MAX_PASSED:
            break
    return chosen


def foremost(waiting: Iterable[C], policy: Policy, standing: Standing, now_ms: float) -> tuple[C, int] | None:
    """Who would be asked first, and the class it counts as; None where nobody waits."""
    first = next(_in_order(list(waiting), policy, standing, now_ms), None)
    return first[:2] if first is not None else None


def in_order_of_retreat(running: Sequence[R]) -> list[R]:
    """Who gives way first when room is short: the least urgent class, of it the newest. `running` is oldest first."""
    return sorted(running, key=lambda one: one.urgency)[::-1]


def victims_of(urgency: int, running: Sequence[R]) -> list[R]:
    """Who gives way to a newcomer that counts as this class, in order: only less urgent ones."""
    return [one for one in in_order_of_retreat(running) if one.urgency > urgency]


def learned_hold_ms(hold_ms: float, kv_ms: float, cost: int) -> float:
    """How long a KV token of cost is held, after one more has ended that held so much: a moving average."""
    return hold_ms + _HOLD_WEIGHT * (kv_ms / max(1, cost) - hold_ms)


def _in_order(waiting: list[C], policy: Policy, standing: Standing, now_ms: float) -> Iterator[tuple[C, int, bool]]:
    """(candidate, class it counts as, whether it is its class's head), while `standing` follows what is taken."""
    if policy.name == "fcfs":
        yield from ((one, LEAST_URGENT, False) for one in sorted(waiting, key=_age))
        return
    classes = [[one for one in waiting if one.priority == p] for p in range(NUM_PRIORITIES)]
    heads = [_head(members, policy, standing.turns[p]) for p, members in enumerate(classes)]
    risen = []
    for p, head in enumerate(heads):
        if head is not None:
            since_ms = max(head.submitted_ms, standing.head_served_ms[p])
            level = p - max(0, now_ms - since_ms) // policy.aging_ms
            if level < p:
                risen.append((level, -p, head))
    risen.sort(key=lambda one: one[:2])
    for p, members in enumerate(classes):
        while risen and risen[0][0] <= p:
            _, _, head = risen.pop(0)
            classes[head.priority].remove(head)
            yield head, p, True
        yield from ((one, p, one is heads[p]) for one in _in_class(members, policy, standing.turns[p]))


def _in_class(members: list[C], policy: Policy, turns: Turns) -> Iterator[C]:
    if policy.name == "fair":
        yield from _in_turn(members, turns)
    elif policy.name == "sjf":
        yield from sorted(members, key=lambda one: (one.cost, *_age(one)))
    else:
        yield from sorted(members, key=_age)


def _in_turn(members: list[C], turns: Turns) -> Iterator[C]:
    """Of the tenant with the least time its oldest; whoever is started moves its tenant's time on meanwhile."""
    queues: dict[str, deque[C]] = {}
    for one in sorted(members, key=_age):
        queues.setdefault(one.tenant, deque()).append(one)
    while queues:
        tenant = min(queues, key=lambda name: (turns.times[name], name))
        yield queues[tenant].popleft()
        if not queues[tenant]:
            del queues[tenant]


def _head(members: list[C], policy: Policy, turns: Turns) -> C | None:
    return next(_in_turn(members, turns), None) if policy.name == "fair" else min(members, key=_age, default=None)


def _age(one: Candidate) -> tuple[float, str]:
    return one.submitted_ms, one.job_id
