"""A limited amount, such as bytes of memory, that the tenants of a gateway share fairly."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class _Claim:
    """A request for an amount that waits to be granted."""

    amount: int
    granted: asyncio.Future[None]


class SharedBudget:
    """A semaphore over `total` units that is fair among owners.

    The claims of one owner are granted in order; owners are served round robin. One owner never holds more than
    `per_owner` units, so that other owners can still be served.
    """

    def __init__(self, total: int, *, per_owner: int) -> None:
        self._total = total
        self._per_owner = per_owner
        self._num_used = 0
        self._held: dict[str, int] = {}
        self._claims: dict[str, deque[_Claim]] = {}
        """Waiting claims by owner. The first owner in the dictionary is served next."""

    @property
    def num_used(self) -> int:
        """The units that are granted now, over all owners."""
        return self._num_used

    @asynccontextmanager
    async def taken(self, owner: str, amount: int) -> AsyncIterator[None]:
        """Wait for `amount` units and hold them in the block. An amount above the owner's share is cut to the share."""
        amount = min(amount, self._per_owner)
        if not amount:
            yield
            return
        if owner not in self._claims and self._fits(owner, amount) and not self._claims:
            self._grant(owner, amount)
        else:
            await self._wait(owner, amount)
        try:
            yield
        finally:
            self._give_back(owner, amount)

    async def _wait(self, owner: str, amount: int) -> None:
        claim = _Claim(amount, asyncio.get_running_loop().create_future())
        self._claims.setdefault(owner, deque()).append(claim)
        self._serve()
        try:
            await claim.granted
        except asyncio.CancelledError:
            if claim.granted.done() and not claim.granted.cancelled():
                self._give_back(owner, amount)
            else:
                self._drop(owner, claim)
                self._serve()
            raise

    def _fits(self, owner: str, amount: int) -> bool:
        has_share = self._held.get(owner, 0) + amount <= self._per_owner
        return has_share and self._num_used + amount <= self._total

    def _grant(self, owner: str, amount: int) -> None:
        self._num_used += amount
        self._held[owner] = self._held.get(owner, 0) + amount

    def _give_back(self, owner: str, amount: int) -> None:
        self._num_used -= amount
        self._held[owner] -= amount
        if not self._held[owner]:
            del self._held[owner]
        self._serve()

    def _serve(self) -> None:
        """Grant waiting claims, one owner after the other.

        A claim that its owner's share forbids is skipped. A claim that exceeds the free total stops the round:
        otherwise smaller claims of other owners would starve it.
        """
        progress = True
        while progress:
            progress = False
            for owner in list(self._claims):
                claim = self._claims[owner][0]
                if claim.granted.done():  # canceled; its waiter has not removed it yet
                    self._drop(owner, claim)
                    progress = True
                    continue
                if self._held.get(owner, 0) + claim.amount > self._per_owner:
                    continue
                if not self._fits(owner, claim.amount):
                    return
                self._drop(owner, claim)
                # The owner moves to the end of the round.
                if owner in self._claims:
                    self._claims[owner] = self._claims.pop(owner)
                self._grant(owner, claim.amount)
                claim.granted.set_result(None)
                progress = True

    def _drop(self, owner: str, claim: _Claim) -> None:
        claims = self._claims.get(owner, deque())
        if claim in claims:
            claims.remove(claim)
            if not claims:
                del self._claims[owner]
