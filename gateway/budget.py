"""A limited amount, such as bytes of memory, that the tenants of a gateway share fairly."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import deque
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.contract.errors import UnavailableError

_RETRY_AFTER_MS = 5000
_numbers = itertools.count()


class Claim:
    """The units that one request holds. The end of its block gives them back."""

    __slots__ = ("_budget", "_first", "amount", "owner")

    def __init__(self, budget: SharedBudget, owner: str, first: Claim | None = None) -> None:
        """`first`: the claim beside which the same request takes this one."""
        self._budget = budget
        self._first = first
        self.owner = owner
        self.amount = 0

    @property
    def is_second(self) -> bool:
        """Whether its request already holds something, so that others may wait for this claim."""
        return self._first is not None and self._first.amount > 0

    async def grow_to(self, amount: int) -> None:
        """Wait until this claim has `amount` units, or as many as one claim may have if that is less."""
        await self._budget.grow(self, amount)

    def shrink_to(self, amount: int) -> None:
        """Give back what exceeds `amount`."""
        self._budget.shrink(self, amount)


@dataclass(slots=True, eq=False)
class _WaitingClaim:
    """A claim that waits until it may have `amount` units."""

    claim: Claim
    amount: int
    granted: asyncio.Future[None]
    number: int = field(default_factory=lambda: next(_numbers))
    """Waiting claims are numbered in order of arrival."""


class Refusal(NamedTuple):
    """How an error names a full budget."""

    held: str
    """What the units are for."""
    code: str


FULL_OF_ANSWERS = Refusal("answers", code="answer_memory_full")


class SharedBudget:
    """A semaphore over `total` units that is fair among owners.

    The claims of one owner are granted in order; owners are served round robin. One owner never holds more than
    `per_owner` units, so that other owners can still be served.

    With a `step`, claims grow by multiples of it, each up to `most`. Such claims might all wait for each other. So a
    step is granted only if the rest lets one claim reach `most` (Dijkstra's banker's algorithm). Steps that can be
    granted pass those that cannot.

    Waiting claims keep what they wait with, such as the part of a body that has arrived. `max_waiting` bounds that.

    A request may take a second claim beside its first one. Such requests might all wait for each other, too. So a
    `reserve` is kept for them, which is as large as one claim may be. A second claim that does not fit elsewhere
    gets the reserve, one claim after the other. With it the request has all it needs, so it ends and gives back both.
    """

    def __init__(
        self,
        total: int,
        *,
        per_owner: int,
        step: int = 0,
        most: int | None = None,
        max_wait_s: float | None = None,
        max_waiting: int | None = None,
        has_reserve: bool = False,
        refusal: Refusal = FULL_OF_ANSWERS,
    ) -> None:
        """`most`: the most that one claim may have, by default `per_owner`.

        max_wait_s: after so long, a waiting claim raises UnavailableError. None: it waits as long as it must.
        max_waiting: a claim raises it at once if its owner would wait for more units than this. None: it waits.
        refusal: how that error names the budget.
        has_reserve: whether `most` of `total` is the reserve for second claims. No owner's share counts it.
        """
        self._per_owner = per_owner
        self._most = per_owner if most is None else min(most, per_owner)
        self._total = total - self._most if has_reserve else total
        self._has_reserve = has_reserve
        self._in_reserve: Claim | None = None
        self._step = step
        self._max_wait_s = max_wait_s
        self._max_waiting = math.inf if max_waiting is None else max_waiting
        self._refusal = refusal
        self._num_used = 0
        # Keyed by tenant; no text of a request.
        self._claims: dict[str, set[Claim]] = {}
        """The claims by owner that hold something."""
        # Keyed by tenant; no text of a request.
        self._waiting: dict[str, deque[_WaitingClaim]] = {}
        """Waiting claims by owner. The first owner in the dictionary is served next."""

    @property
    def num_used(self) -> int:
        """The units that are granted now, over all owners."""
        return self._num_used + (0 if self._in_reserve is None else self._in_reserve.amount)

    @asynccontextmanager
    async def taken(self, owner: str, amount: int = 0, *, beside: Claim | None = None) -> AsyncIterator[Claim]:
        """Wait for `amount` units and hold them in the block. More than one claim may have is cut to that.

        `beside`: the claim that the same request holds already. The request must not wait for a third one.
        """
        claim = Claim(self, owner, beside)
        try:
            await self.grow(claim, amount)
            yield claim
        finally:
            self.shrink(claim, 0)

    async def grow(self, claim: Claim, amount: int) -> None:
        """Wait until a claim has `amount` units, or as many as one claim may have if that is less."""
        if self._step:
            amount = -(-amount // self._step) * self._step
        amount = min(amount, self._most)
        if amount <= claim.amount:
            return
        if not self._waiting and self._fits_share(claim, amount) and self._fits_total(claim, amount):
            self._grant(claim, amount)
        else:
            await self._wait(claim, amount)

    def shrink(self, claim: Claim, amount: int) -> None:
        """Give back what a claim has above `amount`."""
        if claim.amount <= amount:
            return
        if claim is self._in_reserve:
            claim.amount = amount
            self._in_reserve = claim if amount else None
            self._serve()
            return
        self._num_used -= claim.amount - amount
        claim.amount = amount
        if not amount:
            self._claims[claim.owner].discard(claim)
            if not self._claims[claim.owner]:
                del self._claims[claim.owner]
        self._serve()

    async def _wait(self, claim: Claim, amount: int) -> None:
        if sum(one.amount for one in self._waiting.get(claim.owner, ())) + amount > self._max_waiting:
            raise self._full()
        waiting = _WaitingClaim(claim, amount, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(claim.owner, deque()).append(waiting)
        self._serve()
        try:
            async with asyncio.timeout(self._max_wait_s):
                await waiting.granted
        except TimeoutError:
            raise self._full() from None
        finally:
            # If this task was canceled just after the grant, the end of the claim's block gives it back.
            self._drop(waiting)
            self._serve()

    def _full(self) -> UnavailableError:
        message = f"this gateway holds as many large {self._refusal.held} as it may; repeat the request later"
        return UnavailableError(message, retry_after_ms=_RETRY_AFTER_MS, code=self._refusal.code)

    def _fits_share(self, claim: Claim, amount: int) -> bool:
        claims = self._claims.get(claim.owner, ())
        return self._fits_in(self._per_owner - sum(one.amount for one in claims), claim, amount, claims)

    def _fits_total(self, claim: Claim, amount: int) -> bool:
        claims = (one for of_owner in self._claims.values() for one in of_owner)
        return self._fits_in(self._total - self._num_used, claim, amount, claims)

    def _fits_in(self, free: int, claim: Claim, amount: int, claims: Iterable[Claim]) -> bool:
        """Return whether a claim may have `amount` while so many units are free beside the claims."""
        rest = free - (amount - claim.amount)
        if not self._step or rest < 0:
            return rest >= 0
        largest = max((one.amount for one in claims if one is not claim), default=0)
        return rest >= self._most - max(amount, largest)

    def _grant(self, claim: Claim, amount: int) -> None:
        self._num_used += amount - claim.amount
        claim.amount = amount
        self._claims.setdefault(claim.owner, set()).add(claim)

    def _serve(self) -> None:
        """Grant waiting claims: all that fit, and then the reserve."""
        self._serve_owners()
        if self._has_reserve and self._in_reserve is None:
            every = (each for queue in self._waiting.values() for each in queue if not each.granted.done())
            waiting = min((each for each in every if each.claim.is_second), key=lambda each: each.number, default=None)
            if waiting is not None:
                self._drop(waiting)
                self._in_reserve, waiting.claim.amount = waiting.claim, waiting.amount
                waiting.granted.set_result(None)

    def _serve_owners(self) -> None:
        """Grant the waiting claims that fit, one owner after the other.

        A claim that its owner's share forbids is skipped. A claim that exceeds the free total stops the round:
        otherwise smaller claims of other owners would starve it. Steps are all of one size, so they need not wait for
        each other.
        """
        progress = True
        while progress:
            progress = False
            for owner in list(self._waiting):
                waiting = self._next_of(owner)
                if waiting is None:
                    continue
                if not self._step and not self._fits_total(waiting.claim, waiting.amount):
                    return
                self._drop(waiting)
                # The owner moves to the end of the round.
                if owner in self._waiting:
                    self._waiting[owner] = self._waiting.pop(owner)
                self._grant(waiting.claim, waiting.amount)
                waiting.granted.set_result(None)
                progress = True

    def _next_of(self, owner: str) -> _WaitingClaim | None:
        """Return the next claim of an owner if its share permits it; of steps, the first that can be granted."""
        for waiting in self._waiting[owner]:
            if waiting.granted.done():  # canceled; its waiter has not removed it yet
                continue
            if not self._step:
                return waiting if self._fits_share(waiting.claim, waiting.amount) else None
            if self._fits_share(waiting.claim, waiting.amount) and self._fits_total(waiting.claim, waiting.amount):
                return waiting
        return None

    def _drop(self, waiting: _WaitingClaim) -> None:
        queue = self._waiting.get(waiting.claim.owner, deque())
        if waiting in queue:
            queue.remove(waiting)
            if not queue:
                del self._waiting[waiting.claim.owner]
