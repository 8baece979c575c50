"""State of the scheduling policies between two scans of the queue: virtual times, debts and recent use of tenants.

Pure; time is an argument.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field

from penstock.contract.priority import NUM_LEVELS, NUM_PRIORITIES, is_background

MAX_DEBTS = 1000
"""Debts remembered per class; the smallest ones are dropped."""
SHARE_WINDOW_MS = 10_000
"""A charge counts towards its tenant's share in the window in which it was made and in the next one."""
_MAX_CHARGE = 1e15
"""Largest charge; Lua's numbers cannot hold much larger integers exactly."""


class VirtualTimes:
    """Virtual times of the tenants of one class, for fair queueing. Each start advances a tenant's time by its charge.

    `now`, the virtual clock, is the highest virtual time at which a job started; it never decreases. It rises by 1 with
    each tenant that enters, so that new tenants are served in the order of their arrival. A tenant that enters gets
    `now`, or its remembered debt if that is higher. So an idle tenant gains no credit, and its debt is not forgiven.
    """

    def __init__(self) -> None:
        self.now = 0.0
        # Keyed by tenant; no text of a request.
        self.times: dict[str, float] = {}
        """Virtual times of tenants with queued work."""
        # Keyed by tenant; no text of a request.
        self.debts: dict[str, float] = {}
        """Virtual times of tenants without queued work, if they are ahead of `now`."""

    def enter(self, tenant: str) -> None:
        """Add a tenant that now has queued work."""
        if tenant not in self.times:
            self.times[tenant] = max(self.now, self.debts.pop(tenant, 0.0))
            self.now += 1

    def leave(self, tenant: str) -> None:
        """Remove a tenant that has no queued work left."""
        self._remember_debt(tenant, self.times.pop(tenant))

    def start(self, tenant: str, charge: float) -> None:
        """Charge a tenant with queued work for a job that starts."""
        if self.times[tenant] > self.now:
            self.now = self.times[tenant]
            self.debts = {name: time for name, time in self.debts.items() if time > self.now}
        self.times[tenant] += charge

    def correct(self, tenant: str, by: float) -> None:
        """Correct an earlier charge; `by` is negative if it was too high."""
        if tenant in self.times:
            self.times[tenant] += by
        else:
            self._remember_debt(tenant, self.debts.pop(tenant, self.now) + by)

    def _remember_debt(self, tenant: str, time: float) -> None:
        if time > self.now:
            self.debts[tenant] = time
        if len(self.debts) > MAX_DEBTS:
            del self.debts[min(self.debts, key=lambda name: self.debts[name])]


class RecentUse:
    """What foreground work charged to each tenant in the present time window and in the last one.

    In whole KV-token-ms ÷ weight. Background work fills idle capacity, so it costs its tenant no place in the order of
    foreground work.
    """

    def __init__(self, window_ms: float) -> None:
        self._window_ms = window_ms
        self._index = 0
        # Keyed by tenant; no text of a request.
        self.this: dict[str, int] = {}
        # Keyed by tenant; no text of a request.
        self.last: dict[str, int] = {}

    def note(self, tenant: str, amount: float, now_ms: float, since_ms: float = 0.0) -> None:
        """Add a charge, or a refund (negative `amount`) of a charge made at `since_ms`.

        A refund is subtracted in the window of its charge. If that window is too old, the refund is dropped, because in
        another window it would be a credit.
        """
        self._advance_to(now_ms)
        counted = self.this
        if amount < 0 and (index := math.floor(since_ms / self._window_ms)) != self._index:
            if index != self._index - 1:
                return
            counted = self.last
        whole = math.floor(max(-_MAX_CHARGE, min(_MAX_CHARGE, amount)) + 0.5)
        counted[tenant] = counted.get(tenant, 0) + whole

    def of(self, tenant: str, now_ms: float) -> int:
        """Return a tenant's use in both windows."""
        self._advance_to(now_ms)
        return max(0, self.this.get(tenant, 0) + self.last.get(tenant, 0))

    def _advance_to(self, now_ms: float) -> None:
        index = math.floor(now_ms / self._window_ms)
        if index != self._index:
            self.this, self.last = {}, self.this if index == self._index + 1 else {}
            self._index = index


BACKGROUND_WEIGHTS = (4, 2, 1)
"""Weights of the classes in the time that is kept for background work."""


class BackgroundTurns:
    """Turns of the classes of background work in the time that is kept for it.

    A turn advances its class by the job's cost ÷ the weight of the class. A class that waits anew starts where the last
    turn was.
    """

    def __init__(self) -> None:
        self._last = 0.0
        self._turns = [0.0] * NUM_PRIORITIES

    def next_of(self, waiting: Collection[int]) -> int:
        """Return the level that is next among these levels of background work."""
        return min(waiting, key=lambda level: (self._turn_of(level), level))

    def start(self, level: int, cost: int) -> None:
        """Advance a level by a job of this cost that starts in its turn."""
        self._last = self._turn_of(level)
        self._turns[level - NUM_PRIORITIES] = self._last + cost / BACKGROUND_WEIGHTS[level - NUM_PRIORITIES]

    def _turn_of(self, level: int) -> float:
        return max(self._last, self._turns[level - NUM_PRIORITIES])


@dataclass(slots=True)
class PolicyState:
    """The state of a queue's policy between two scans."""

    share_window_ms: float = SHARE_WINDOW_MS
    use: RecentUse = field(init=False)
    virtual_times: list[VirtualTimes] = field(default_factory=lambda: [VirtualTimes() for _ in range(NUM_LEVELS)])
    """The tenants' virtual times, per level."""
    head_served_ms: list[float] = field(default_factory=lambda: [0.0] * NUM_PRIORITIES)
    """When the head of a class last started, per class of foreground work."""
    background_turns: BackgroundTurns = field(default_factory=BackgroundTurns)

    def __post_init__(self) -> None:
        self.use = RecentUse(self.share_window_ms)

    def start(self, level: int, tenant: str, charge: float, now_ms: float) -> None:
        """Charge a tenant with queued work for a job that starts."""
        self.virtual_times[level].start(tenant, charge)
        if not is_background(level):
            self.use.note(tenant, charge, now_ms)

    def correct(self, level: int, tenant: str, by: float, now_ms: float, since_ms: float) -> None:
        """Correct the charge that a tenant got at `since_ms`; `by` is negative if it was too high."""
        self.virtual_times[level].correct(tenant, by)
        if not is_background(level):
            self.use.note(tenant, by, now_ms, since_ms)

    def shares(self, now_ms: float) -> Shares:
        """Return a view of the tenants' shares of foreground work; it follows later charges."""
        waiting = frozenset().union(*(times.times for times in self.virtual_times[:NUM_PRIORITIES]))
        return Shares(self.use, waiting, now_ms)


@dataclass(frozen=True, slots=True)
class Shares:
    """The tenants' recent use compared with the mean; `waiting` are the tenants with queued work."""

    use: RecentUse
    waiting: frozenset[str]
    now_ms: float

    def goes_first(self, tenant: str) -> bool:
        """Return whether a tenant's recent use is at most the mean of the tenants with queued work."""
        return self._is_within(tenant, self.waiting)

    def may_displace(self, tenant: str) -> bool:
        """Return whether its recent use is at most the mean of all tenants with queued work or recent use."""
        return self._is_within(tenant, self.waiting | self.use.this.keys() | self.use.last.keys())

    def _is_within(self, tenant: str, tenants: frozenset[str]) -> bool:
        counted = [self.use.of(name, self.now_ms) for name in tenants]
        num_tenants = len(self.waiting) + sum(1 for name in tenants - self.waiting if self.use.of(name, self.now_ms))
        return self.use.of(tenant, self.now_ms) * num_tenants <= sum(counted)
