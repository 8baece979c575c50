"""In which order queued work is served and who gives way to it: fcfs, priority, sjf, fair. Pure; time is an argument.

take.lua says the same in Lua, and a test through a real Redis holds both equal. The engine orders its own lists and the
simulator its queue with what stands here.

`fcfs` looks at nothing but age. The others serve class by class, the most urgent one first, and inside a class

    priority   the oldest first
    sjf        the cheapest first, by predicted cost
    fair       the tenant whose turn it is (`VirtualTimes`), and of a tenant the oldest

*Aging.* The head of a class (its oldest; under fair the one whose turn it is) counts as one class higher for each
`aging_ms` since it was submitted or the class's last head was served, whichever is later: so a class is never starved,
and a backlog of a day, however old, does not turn into the most urgent work there is.

*Shares.* Under fair, class 0 goes before class 1 only while its tenant is within its share. A tenant is above its share
while it used more in this and the last window of `share_window_ms` than the mean of all tenants with queued work. Use
is what turns count: predicted KV-token-milliseconds ÷ weight at each start, corrected at the end. Class 0 of a tenant
above its share counts as class 1 and stands behind it. Where others have nothing queued, but used less in those windows
than the mean, class 0 goes first and still counts as class 1, so that it takes no place from their running work. So a
tenant at the highest class cannot keep another below half of its fair share for longer than two windows and the jobs
that were running then. Class 2 gives way by its own choice.

*Bypass.* One that does not fit may be passed by others until it is `bypass_ms` old; then whoever makes room for it
starts nobody who stands behind it. Of a pool's nodes one does that, and the others go on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

from penstock.contract.priority import NUM_PRIORITIES
from penstock.queue.policy_state import SHARE_WINDOW_MS, PolicyState, Shares, VirtualTimes

PolicyName = Literal["fcfs", "priority", "sjf", "fair"]
LEAST_URGENT = NUM_PRIORITIES - 1
MAX_PASSED = 16
"""In one look at the queue: so many that do not fit and are passed end it."""
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


class RunningJob(Protocol):
    """One that has been started; `urgency` is the class that it was started as."""

    @property
    def urgency(self) -> int:
        """At most its own class, less when it had aged."""


C = TypeVar("C", bound=Candidate)
R = TypeVar("R", bound=RunningJob)


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """A pool's choice; its nodes must agree on it."""

    name: PolicyName = "fcfs"
    aging_ms: int = 60_000
    bypass_ms: int = 2_000
    share_window_ms: int = SHARE_WINDOW_MS

    def longest_wait_ms(self, priority: int, num_before: int, turnover_ms: int) -> int:
        """The longest that one of this class waits with `num_before` before it in its class, whatever others send.

            (num_before + 1) × (rise × aging_ms + 3 × turnover_ms)

        `rise` is the classes its head has to rise to be the next one: as many as its class, under sjf at least one, and
        under fair too, where class 0 of a tenant above its share stands behind class 1.
        `turnover_ms` is the longest until room for one job is free that nobody passes; risen heads of the other two
        classes may go first. Not for fcfs, where who came before is all there is.
        """
        rise = priority if self.name == "priority" else max(priority, 1)
        return (num_before + 1) * (rise * self.aging_ms + 3 * turnover_ms)


def choose(
    waiting: Iterable[C],
    policy: PolicyConfig,
    standing: PolicyState,
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
            standing.start(candidate.priority, candidate.tenant, candidate.charge, now_ms)
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


def foremost(waiting: Iterable[C], policy: PolicyConfig, standing: PolicyState, now_ms: float) -> tuple[C, int] | None:
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


def _in_order(
    waiting: list[C], policy: PolicyConfig, standing: PolicyState, now_ms: float
) -> Iterator[tuple[C, int, bool]]:
    """(candidate, class it counts as, whether it is its class's head), while `standing` follows what is taken."""
    if policy.name == "fcfs":
        yield from ((one, LEAST_URGENT, False) for one in sorted(waiting, key=_age))
        return
    classes = [[one for one in waiting if one.priority == p] for p in range(NUM_PRIORITIES)]
    lines = [_Line(members, policy, standing.turns[p]) for p, members in enumerate(classes)]
    heads = [line.head() for line in lines]
    risen = _risen(heads, policy, standing, now_ms)
    shares = standing.shares(now_ms) if policy.name == "fair" and classes[0] else None
    while (found := _next_of(lines, risen, shares)) is not None:
        one, urgency = found
        yield one, urgency, one is heads[one.priority]


def _next_of(lines: list[_Line[C]], risen: list[tuple[float, int, C]], shares: Shares | None) -> tuple[C, int] | None:
    """The next candidate and the class it counts as.

    Interactive work of tenants above their share stands behind standard work; this is asked anew for each, as what was
    just taken has changed the shares.
    """
    interactive, standard, batch = lines

    def risen_to(p: int) -> C | None:
        if not risen or risen[0][0] > p:
            return None
        head = risen.pop(0)[2]
        lines[head.priority].remove(head)
        return head

    if (one := risen_to(0)) is not None:
        return one, 0
    if (one := interactive.take(shares.goes_first if shares else None)) is not None:
        return one, int(shares is not None and not shares.may_displace(one.tenant))
    if (one := risen_to(1) or standard.take() or interactive.take()) is not None:
        return one, 1
    one = risen_to(2) or batch.take()
    return None if one is None else (one, 2)


def _risen(
    heads: list[C | None], policy: PolicyConfig, standing: PolicyState, now_ms: float
) -> list[tuple[float, int, C]]:
    """(level, -class, head) of the heads that count as more than their class, the most urgent one first."""
    risen = []
    for p, head in enumerate(heads):
        if head is not None:
            since_ms = max(head.submitted_ms, standing.head_served_ms[p])
            level = p - max(0, now_ms - since_ms) // policy.aging_ms
            if level < p:
                risen.append((level, -p, head))
    return sorted(risen, key=lambda one: one[:2])


class _Line(Generic[C]):
    """What waits of one class, in the policy's order; under fair one queue a tenant, whose turns may move meanwhile."""

    def __init__(self, members: list[C], policy: PolicyConfig, turns: VirtualTimes) -> None:
        self._turns = turns if policy.name == "fair" else None
        self._queues: dict[str, deque[C]] = {}
        by_cost = policy.name == "sjf"
        for one in sorted(members, key=lambda one: (one.cost, *_age(one)) if by_cost else _age(one)):
            self._queues.setdefault(one.tenant if self._turns else "", deque()).append(one)
        self._head = self._first(_anyone) if self._turns else min(members, key=_age, default=None)

    def head(self) -> C | None:
        """The one that aging looks at."""
        return self._head

    def take(self, may: Callable[[str], bool] | None = None) -> C | None:
        """The next one, of a tenant that may."""
        one = self._first(may or _anyone)
        if one is not None:
            self.remove(one)
        return one

    def remove(self, one: C) -> None:
        """Takes out one that goes before its turn."""
        name = one.tenant if self._turns else ""
        self._queues[name].remove(one)
        if not self._queues[name]:
            del self._queues[name]

    def _first(self, may: Callable[[str], bool]) -> C | None:
        if self._turns is None:
            return self._queues[""][0] if self._queues else None
        times = self._turns.times
        in_turn = sorted(self._queues, key=lambda name: (times[name], name))
        return next((self._queues[name][0] for name in in_turn if may(name)), None)


def _anyone(tenant: str) -> bool:
    return True


def _age(one: Candidate) -> tuple[float, str]:
    return one.submitted_ms, one.job_id
