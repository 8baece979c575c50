"""Shares of a device under the policy `fair`: which sequences yield to a tenant below its share.

The resource that counts is a tenant's dominant one: its sequence slots or its KV blocks, whichever is the larger part
of the device (A. Ghodsi et al., *Dominant Resource Fairness*, NSDI 2011). A tenant's share is its weight ÷ the weights
of all tenants with running or waiting sequences. Pure; take.lua gives jobs to a node by the same rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from penstock.contract.priority import Priority
from penstock.gpu_node.engine.sequence import Sequence

MAX_SHARE_PREEMPTIONS = 3
"""A sequence that was preempted this often runs on, whatever its tenant holds."""


@dataclass(frozen=True, slots=True)
class SharedDevice:
    """What sequences share."""

    num_slots: int
    num_blocks: int
    blocks_of: Callable[[int], int]
    """The number of blocks for a number of tokens."""


class Holdings:
    """The slots and blocks of each tenant with running or waiting sequences, as parts of the device."""

    def __init__(self, device: SharedDevice, running: Iterable[Sequence], waiting: Iterable[Sequence]) -> None:
        self._device = device
        self._held: dict[str, list[int]] = {}
        self._weights: dict[str, float] = {}
        for seq in waiting:
            self._weights[seq.tenant] = seq.weight
            self._held.setdefault(seq.tenant, [0, 0])
        for seq in running:
            self._weights[seq.tenant] = seq.weight
            self._add(seq, 1)
        self._sum = sum(self._weights.values())

    @property
    def num_tenants(self) -> int:
        """The number of tenants with running or waiting sequences."""
        return len(self._weights)

    def share_of(self, tenant: str) -> float:
        """Return the part of the device that is a tenant's share."""
        return self._weights[tenant] / self._sum

    def part_of(self, tenant: str, num_more_slots: int = 0, num_more_blocks: int = 0) -> float:
        """Return the part of the device that a tenant holds, or would hold with so many more slots and blocks."""
        slots, blocks = self._held[tenant]
        device = self._device
        return max((slots + num_more_slots) / device.num_slots, (blocks + num_more_blocks) / device.num_blocks)

    def excess_of(self, tenant: str) -> float:
        """Return by how much a tenant is above its share, for its weight; negative if it is below."""
        return self.part_of(tenant) / self.share_of(tenant) - 1

    def may_start(self, seq: Sequence) -> bool:
        """Return whether others yield to a sequence: its tenant holds nothing, or stays within its share."""
        return self.part_of(seq.tenant) == 0 or self.excess_with(seq) <= 0

    def excess_with(self, seq: Sequence) -> float:
        """Return the excess that a waiting sequence's tenant would have with it."""
        num_blocks = self._device.blocks_of(len(seq.token_ids))
        return self.part_of(seq.tenant, 1 + len(seq.forks), num_blocks) / self.share_of(seq.tenant) - 1

    def release(self, seq: Sequence) -> None:
        """Count a sequence as preempted."""
        self._add(seq, -1)

    def restore(self, seq: Sequence) -> None:
        """Count a released sequence as running again."""
        self._add(seq, 1)

    def _add(self, seq: Sequence, sign: int) -> None:
        held = self._held.setdefault(seq.tenant, [0, 0])
        held[0] += sign * (1 + len(seq.forks))
        held[1] += sign * (len(seq.blocks) + (seq.spare is not None))


def share_request(
    waiting: Iterable[Sequence], running: list[Sequence], device: SharedDevice
) -> tuple[Sequence, list[Sequence]] | None:
    """Return the first waiting sequence of the tenant furthest below its share, and the sequences that yield.

    These are sequences of tenants above their share: always the newest one of the tenant that is then furthest above.
    No tenant yields so much that it would hold less, for its weight, than the one that it yields to. Returns None if no
    tenant with waiting sequences is below its share, or none is above.
    """
    queued = list(waiting)
    # This runs at every step with a queue. A single tenant ends it here.
    if len({seq.tenant for seq in (*queued, *running)}) < 2:
        return None
    holdings = Holdings(device, running, queued)
    firsts: dict[str, Sequence] = {}
    for seq in sorted(queued, key=lambda one: one.level):
        firsts.setdefault(seq.tenant, seq)
    below = [seq for tenant, seq in firsts.items() if holdings.excess_of(tenant) < 0 and holdings.may_start(seq)]
    if not below:
        return None
    candidate = min(below, key=lambda seq: holdings.excess_of(seq.tenant))
    victims = _victims(candidate, running, holdings)
    return (candidate, victims) if victims else None


def _victims(candidate: Sequence, running: list[Sequence], holdings: Holdings) -> list[Sequence]:
    by_tenant: dict[str, list[Sequence]] = {}
    for seq in running:
        # Batch and background work yield to the others by their sender's choice.
        yields = candidate.level < Priority.BATCH or seq.urgency >= candidate.level
        if seq.tenant != candidate.tenant and yields and seq.num_preemptions < MAX_SHARE_PREEMPTIONS:
            by_tenant.setdefault(seq.tenant, []).append(seq)
    victims: list[Sequence] = []
    wanted = holdings.excess_with(candidate)
    while by_tenant:
        tenant = max(by_tenant, key=holdings.excess_of)
        if holdings.excess_of(tenant) <= 0:
            break
        seq = by_tenant[tenant].pop()
        holdings.release(seq)
        if holdings.excess_of(tenant) < wanted:
            # It would hold less than the candidate's tenant then, and ask for it back.
            holdings.restore(seq)
            del by_tenant[tenant]
            continue
        victims.append(seq)
        if not by_tenant[tenant]:
            del by_tenant[tenant]
    return victims
