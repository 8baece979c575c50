"""The queue's scheduling policies inside an engine: the KV use of each tenant, and shares of the device under `fair`.

The resource that counts is a tenant's dominant one: its sequence slots or its KV blocks, whichever is the larger part
of the device (A. Ghodsi et al., *Dominant Resource Fairness*, NSDI 2011). A tenant's share is its weight ÷ the weights
of all tenants with running or waiting sequences. take.lua gives jobs to a node by the same rule.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from penstock.contract.job import PREDICTED_OUTPUT_TOKENS
from penstock.contract.priority import Priority
from penstock.gpu_node.engine.config import EngineConfig
from penstock.gpu_node.engine.policy.policy import (
    AdapterSlots,
    ByAdapter,
    FirstComeFirstServed,
    NumTokens,
    SchedulingPolicy,
    SharedDevice,
    in_turns,
)
from penstock.gpu_node.engine.sequence import Sequence
from penstock.queue.job_cost import HOLD_MS, LengthPredictor, learned_hold_ms
from penstock.queue.policy import TURN, PolicyConfig, choose, foremost, preemption_order, victims_of
from penstock.queue.policy_state import PolicyState

MAX_SHARE_PREEMPTIONS = 3
"""A sequence that was preempted this often runs on, whatever its tenant holds."""


class Holdings:
    """The slots and blocks of each tenant with running or waiting sequences, as parts of the device."""

    def __init__(self, device: SharedDevice, running: Iterable[Sequence], waiting: Iterable[Sequence]) -> None:
        self._device = device
        # Keyed by tenant; no text of a request.
        self._held: dict[str, list[int]] = {}
        # Keyed by tenant; no text of a request.
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


ORDERING_QUANTILE = 0.5
"""The order of service depends on the likely length of an output, not on a length that is safe to reserve."""


@dataclass(frozen=True, slots=True)
class _Start:
    """The KV use of a sequence when it started, and what its tenant was charged then."""

    kv_token_ms: float
    charge: float
    at_ms: float


class ByPolicy:
    """A queue policy as a scheduling policy. Preempted sequences are ordered by age and class like all others.

    A start charges the tenant with the predicted KV-token-milliseconds ÷ its weight. When the sequence stops, the
    charge is corrected to its actual use. Under `round_robin` a start is a turn, which is returned if the sequence
    must start again.
    """

    def __init__(self, config: PolicyConfig, now_ms: Callable[[], float]) -> None:
        self._config = config
        self._now_ms = now_ms
        self._state = PolicyState(config.share_window_ms)
        self._predictor = LengthPredictor(ORDERING_QUANTILE)
        self._started: dict[Sequence, _Start] = {}
        self._hold_ms = HOLD_MS
        self._favored: Sequence | None = None
        """The sequence that capacity was freed for."""

    @property
    def has_shares(self) -> bool:
        """Whether tenants have shares of the device and of a step's budget."""
        return self._config.name == "fair"

    @property
    def takes_turns(self) -> bool:
        """Whether sequences get a step's tokens in turns."""
        return self._config.name == "round_robin"

    def added(self, seq: Sequence) -> None:
        """Predict the output length of a sequence that is about to be queued."""
        limit = seq.end_rule.max_tokens
        known = self._predictor.predict(seq.tenant, seq.num_prompt_tokens, limit)
        seq.predicted_tokens = known or min(limit, PREDICTED_OUTPUT_TOKENS)
        seq.remaining_tokens = self._remaining_tokens(seq, len(seq.token_ids))
        seq.submitted_ms = self._now_ms()

    def ended(self, seq: Sequence, num_output_tokens: int) -> None:
        """Train the length predictor with a sequence that ended by itself."""
        limit, predicted = seq.end_rule.max_tokens, seq.predicted_tokens
        self._predictor.ended(seq.tenant, seq.num_prompt_tokens, limit, num_output_tokens, predicted)

    def startable(self, waiting: Iterable[Sequence]) -> Iterable[Sequence]:
        """Return all waiting sequences."""
        return waiting

    def offer(self, waiting: Iterable[Sequence], start: Callable[[Sequence], bool]) -> None:
        """Start sequences in the policy's order.

        Others may pass a sequence that does not fit, until it is old enough that they must wait for it.
        """
        queued, now_ms = self._with_charges(waiting), self._now_ms()

        def fits(seq: Sequence, urgency: int) -> bool:
            if not start(seq):
                return False
            for one in (seq, *seq.forks):
                one.urgency = urgency
                charge = self._charge(one) if self._config.charges_use else TURN * (one is seq)
                self._started[one] = _Start(one.kv_token_ms, charge, now_ms)
            return True

        favored, self._favored = self._favored, None
        if favored is not None and favored in queued and fits(favored, favored.level):
            self._state.start(favored.level, favored.tenant, favored.charge, now_ms)
            queued.remove(favored)
        for turn in in_turns(queued):
            choose(turn, self._config, self._state, now_ms, fits)

    def preemption_request(
        self, waiting: Iterable[Sequence], running: list[Sequence], num_tokens: NumTokens
    ) -> tuple[Sequence, list[Sequence]] | None:
        """Return the first sequence in the policy's order and the less urgent running ones, if there are any."""
        least_urgent = max((seq.urgency for seq in running), default=0)
        now_ms, queued = self._now_ms(), list(waiting)
        old_ms = now_ms - self._config.aging_ms
        # This runs at every step and nearly always ends here.
        if not any(seq.level < least_urgent or seq.submitted_ms <= old_ms for seq in queued):
            return None
        first = foremost(self._with_charges(queued), self._config, self._state, now_ms)
        if first is None:
            return None
        candidate, urgency = first
        victims = victims_of(urgency, running, self._remaining_if_shortest_first(num_tokens))
        return (candidate, victims) if victims else None

    def share_request(
        self, waiting: Iterable[Sequence], running: list[Sequence], device: SharedDevice
    ) -> tuple[Sequence, list[Sequence]] | None:
        """Return a sequence of a tenant below its share, with those to preempt for it; None but under `fair`.

        The next offer begins with this sequence, since the capacity is freed for it.
        """
        if not self.has_shares:
            return None
        found = share_request(waiting, running, device)
        self._favored = None if found is None else found[0]
        return found

    def victim(self, running: list[Sequence], num_tokens: NumTokens) -> Sequence:
        """Return the newest of the least urgent running sequences; under `sjf`, the one that will run the longest."""
        return preemption_order(running, self._remaining_if_shortest_first(num_tokens))[0]

    def _remaining_if_shortest_first(self, num_tokens: NumTokens) -> Callable[[Sequence], int]:
        if self._config.name != "sjf":
            return lambda seq: 0
        return lambda seq: self._remaining_tokens(seq, num_tokens(seq))

    def _remaining_tokens(self, seq: Sequence, num_tokens: int) -> int:
        """Predict the further output tokens of a sequence that has `num_tokens`, prompt included."""
        done = num_tokens - seq.num_prompt_tokens
        return self._predictor.remaining(seq.tenant, seq.num_prompt_tokens, seq.end_rule.max_tokens, done)

    def _with_charges(self, waiting: Iterable[Sequence]) -> list[Sequence]:
        """Return the waiting sequences with their charges, after updating each tenant's virtual time."""
        queued = list(waiting)
        present = dict.fromkeys((seq.level, seq.tenant) for seq in queued)  # in order of arrival
        for level, tenant in present:
            self._state.virtual_times[level].enter(tenant)
        self._correct_charges(set(queued))
        for level, virtual_times in enumerate(self._state.virtual_times):
            for tenant in [tenant for tenant in virtual_times.times if (level, tenant) not in present]:
                virtual_times.leave(tenant)
        for seq in queued:
            seq.charge = sum(self._charge(one) for one in (seq, *seq.forks))
        return queued

    def _charge(self, seq: Sequence) -> float:
        return seq.cost * self._hold_ms / seq.weight

    def _correct_charges(self, queued: set[Sequence]) -> None:
        """Correct the charges of stopped sequences, and learn how long a token of cost is held."""
        for seq in [seq for seq in self._started if seq.row < 0]:
            start = self._started.pop(seq)
            used = seq.kv_token_ms - start.kv_token_ms
            if self._config.charges_use:
                correction = used / seq.weight - start.charge
            else:
                correction = -start.charge if seq in queued else 0.0
            self._state.correct(seq.level, seq.tenant, correction, self._now_ms(), start.at_ms)
            if seq in queued:
                seq.remaining_tokens = self._remaining_tokens(seq, len(seq.token_ids))
            else:
                self._hold_ms = learned_hold_ms(self._hold_ms, used, seq.cost)


def new_scheduling_policy(config: EngineConfig, slots: AdapterSlots) -> SchedulingPolicy:
    """Create the policy that an engine's settings name."""
    policy: SchedulingPolicy = FirstComeFirstServed()
    if config.scheduling_policy != "fcfs":
        policy_config = PolicyConfig(config.scheduling_policy, config.aging_ms, config.bypass_ms)
        policy = ByPolicy(policy_config, lambda: time.monotonic() * 1e3)
    return ByAdapter(policy, slots) if config.num_adapter_slots else policy


def note_held(running: Iterable[Sequence], held_ms: float, block_size: int) -> None:
    """Add the time that sequences held their blocks to `kv_token_ms`. A shared block counts for each holder."""
    for seq in running:
        seq.kv_token_ms += len(seq.blocks) * block_size * held_ms
