"""What is remembered of tenants from one look at the queue to the next: turns, debts, recent use. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from penstock.contract.priority import NUM_PRIORITIES

MAX_DEBTS = 1000
"""Tenants whose debt is remembered: the largest debts of a class."""
SHARE_WINDOW_MS = 10_000
"""What a tenant used counts for its share in the window in which it was charged and in the next one."""
_MAX_CHARGE = 1e15
"""Larger ones are no integers to Lua."""


class VirtualTimes:
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


class RecentUse:
    """What each tenant was charged in this window of time and in the last one, in whole KV-token-ms ÷ weight."""

    def __init__(self, window_ms: float) -> None:
        self._window_ms = window_ms
        self._index = 0
        self.this: dict[str, int] = {}
        self.last: dict[str, int] = {}

    def note(self, tenant: str, amount: float, now_ms: float, since_ms: float = 0.0) -> None:
        """A tenant is charged, or gets back what it was charged too much at `since_ms` (negative).

        That comes back in the window in which it was charged, or not at all: elsewhere it would be a credit.
        """
        self._turn_to(now_ms)
        counted = self.this
        if amount < 0 and (index := math.floor(since_ms / self._window_ms)) != self._index:
            if index != self._index - 1:
                return
            counted = self.last
        whole = math.floor(max(-_MAX_CHARGE, min(_MAX_CHARGE, amount)) + 0.5)
        counted[tenant] = counted.get(tenant, 0) + whole

    def of(self, tenant: str, now_ms: float) -> int:
        """What a tenant used lately."""
        self._turn_to(now_ms)
        return max(0, self.this.get(tenant, 0) + self.last.get(tenant, 0))

    def _turn_to(self, now_ms: float) -> None:
        index = math.floor(now_ms / self._window_ms)
        if index != self._index:
            self.this, self.last = {}, self.this if index == self._index + 1 else {}
            self._index = index


@dataclass(slots=True)
class PolicyState:
    """What is remembered from one look at the queue to the next."""

    share_window_ms: float = SHARE_WINDOW_MS
    use: RecentUse = field(init=False)
    turns: list[VirtualTimes] = field(default_factory=lambda: [VirtualTimes() for _ in range(NUM_PRIORITIES)])
    """Per class."""
    head_served_ms: list[float] = field(default_factory=lambda: [0.0] * NUM_PRIORITIES)
    """Per class."""

    def __post_init__(self) -> None:
        self.use = RecentUse(self.share_window_ms)

    def start(self, priority: int, tenant: str, charge: float, now_ms: float) -> None:
        """A job of a tenant with queued work is started."""
        self.turns[priority].start(tenant, charge)
        self.use.note(tenant, charge, now_ms)

    def correct(self, priority: int, tenant: str, by: float, now_ms: float, since_ms: float) -> None:
        """What a tenant was charged at `since_ms` was too little, or too much (negative)."""
        self.turns[priority].correct(tenant, by)
        self.use.note(tenant, by, now_ms, since_ms)

    def shares(self, now_ms: float) -> Shares:
        """Which tenants are within their share, as it stands whenever that is asked."""
        return Shares(self.use, frozenset().union(*(turns.times for turns in self.turns)), now_ms)


@dataclass(frozen=True, slots=True)
class Shares:
    """What tenants used lately beside each other; `waiting` are those with queued work."""

    use: RecentUse
    waiting: frozenset[str]
    now_ms: float

    def goes_first(self, tenant: str) -> bool:
        """Whether a tenant used no more than the mean of those with queued work."""
        return self._is_within(tenant, self.waiting)

    def may_displace(self, tenant: str) -> bool:
        """Whether it used no more than the mean of those with queued work and of all that used anything lately."""
        return self._is_within(tenant, self.waiting | self.use.this.keys() | self.use.last.keys())

    def _is_within(self, tenant: str, tenants: frozenset[str]) -> bool:
        counted = [self.use.of(name, self.now_ms) for name in tenants]
        num_tenants = len(self.waiting) + sum(1 for name in tenants - self.waiting if self.use.of(name, self.now_ms))
        return self.use.of(tenant, self.now_ms) * num_tenants <= sum(counted)
