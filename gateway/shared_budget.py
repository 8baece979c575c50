"""An amount of something that the callers of a gateway share: bytes of memory, or turns."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class _Claim:
    amount: int
    granted: asyncio.Future[None]


class SharedBudget:
    """Grants amounts of a total. One owner's claims are granted in order, those of several owners in turn.

    An owner never holds more than its share, so that the others find some left.
    """

    def __init__(self, total: int, *, per_owner: int) -> None:
        self._total = total
        self._per_owner = per_owner
        self._num_used = 0
        self._held: dict[str, int] = {}
        self._claims: dict[str, deque[_Claim]] = {}
        """Claims that wait; the owner whose turn it is stands first."""

    @property
    def num_used(self) -> int:
        """What is granted now."""
        return self._num_used

    @asynccontextmanager
    async def taken(self, owner: str, amount: int) -> AsyncIterator[None]:
        """Hold an amount, or all of the owner's share if that is less, once it is free."""
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
        """Grant what fits, the owners in turn. A claim that only lacks total is waited for, or it would starve."""
        progress = True
        while progress:
            progress = False
            for owner in list(self._claims):
                claim = self._claims[owner][0]
                if claim.granted.done():  # cancelled a moment ago
                    self._drop(owner, claim)
                    progress = True
                    continue
                if self._held.get(owner, 0) + claim.amount > self._per_owner:
                    continue
                if not self._fits(owner, claim.amount):
                    return
                self._drop(owner, claim)
                # Behind the others from now on.
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
