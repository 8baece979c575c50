"""Scheduling policies of an engine: the interface, first come first served, and the queue's policies."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from penstock.contract.errors import InvariantError
from penstock.contract.job import PREDICTED_OUTPUT_TOKENS
from penstock.gpu_node.engine.config import EngineConfig
from penstock.gpu_node.engine.policy.length_predictor import LengthPredictor
from penstock.gpu_node.engine.policy.shares import Device, share_request
from penstock.gpu_node.engine.sequence import Sequence
from penstock.gpu_node.model.protocol import Adapter, ModelRunner
from penstock.queue.policy import HOLD_MS, PolicyConfig, choose, foremost, learned_hold_ms, preemption_order, victims_of
from penstock.queue.policy_state import PolicyState

# The interface of scheduling policies, and first come, first served.

NumTokens = Callable[[Sequence], int]
"""Number of tokens of a running sequence, prompt included."""


class SchedulingPolicy(Protocol):
    """The order in which a scheduler starts and preempts sequences."""

    @property
    def has_shares(self) -> bool:
        """Whether tenants have shares of the device and of a step's budget."""

    def added(self, seq: Sequence) -> None:
        """Note that a sequence is about to be queued."""

    def ended(self, seq: Sequence, num_output_tokens: int) -> None:
        """Note that a sequence ended by itself, with its number of output tokens."""

    def offer(self, waiting: Iterable[Sequence], start: Callable[[Sequence], bool]) -> None:
        """Call `start` for waiting sequences, in the policy's order. It returns False where a sequence does not fit.

        A policy may offer more sequences after one that does not fit. In `waiting` swapped sequences come first, then
        those that lost their blocks, then new ones in order of arrival.
        """

    def preemption_request(
        self, waiting: Iterable[Sequence], running: list[Sequence], num_tokens: NumTokens
    ) -> tuple[Sequence, list[Sequence]] | None:
        """Return a waiting sequence that may preempt others, with the sequences to preempt, in order; or None."""

    def share_request(
        self, waiting: Iterable[Sequence], running: list[Sequence], device: Device
    ) -> tuple[Sequence, list[Sequence]] | None:
        """Return a sequence of a tenant below its share, with those to preempt for it, in order; or None."""

    def victim(self, running: list[Sequence], num_tokens: NumTokens) -> Sequence:
        """Return the sequence to preempt when a running one finds no free block; it may be the same one."""


class FirstComeFirstServed:
    """First come, first served: no sequence overtakes another, and the newest running one is preempted."""

    has_shares = False

    def added(self, seq: Sequence) -> None:
        """Do nothing: the queue keeps the order of arrival."""

    def ended(self, seq: Sequence, num_output_tokens: int) -> None:
        """Do nothing: output lengths do not matter here."""

    def offer(self, waiting: Iterable[Sequence], start: Callable[[Sequence], bool]) -> None:
        """Start sequences in queue order, up to the first one that does not fit."""
        for seq in waiting:
            if not start(seq):
                return

    def preemption_request(self, waiting: Iterable[Sequence], running: list[Sequence], num_tokens: NumTokens) -> None:
        """Return None: waiting sequences never preempt running ones."""

    def share_request(self, waiting: Iterable[Sequence], running: list[Sequence], device: Device) -> None:
        """Return None: tenants have no shares."""

    def victim(self, running: list[Sequence], num_tokens: NumTokens) -> Sequence:
        """Return the newest running sequence."""
        return running[-1]


# The queue's scheduling policies inside an engine, with the KV use of each tenant.

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
    charge is corrected to its actual use.
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
                self._started[one] = _Start(one.kv_token_ms, self._charge(one), now_ms)
            return True

        favored, self._favored = self._favored, None
        if favored is not None and favored in queued and fits(favored, favored.priority):
            self._state.start(favored.priority, favored.tenant, favored.charge, now_ms)
            queued.remove(favored)
        choose(queued, self._config, self._state, now_ms, fits)

    def preemption_request(
        self, waiting: Iterable[Sequence], running: list[Sequence], num_tokens: NumTokens
    ) -> tuple[Sequence, list[Sequence]] | None:
        """Return the first sequence in the policy's order and the less urgent running ones, if there are any."""
        least_urgent = max((seq.urgency for seq in running), default=0)
        now_ms, queued = self._now_ms(), list(waiting)
        old_ms = now_ms - self._config.aging_ms
        # This runs at every step and nearly always ends here.
        if not any(seq.priority < least_urgent or seq.submitted_ms <= old_ms for seq in queued):
            return None
        first = foremost(self._with_charges(queued), self._config, self._state, now_ms)
        if first is None:
            return None
        candidate, urgency = first
        victims = victims_of(urgency, running, self._remaining_if_shortest_first(num_tokens))
        return (candidate, victims) if victims else None

    def share_request(
        self, waiting: Iterable[Sequence], running: list[Sequence], device: Device
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
        present = dict.fromkeys((seq.priority, seq.tenant) for seq in queued)  # in order of arrival
        for priority, tenant in present:
            self._state.virtual_times[priority].enter(tenant)
        self._correct_charges(set(queued))
        for priority, virtual_times in enumerate(self._state.virtual_times):
            for tenant in [tenant for tenant in virtual_times.times if (priority, tenant) not in present]:
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
            correction = used / seq.weight - start.charge
            self._state.correct(seq.priority, seq.tenant, correction, self._now_ms(), start.at_ms)
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


# The runner's adapter slots: which sequences use each, and which adapter is loaded next when all are taken.


class AdapterSlots:
    """The adapter in each slot, and the running sequences that use it.

    A slot without users keeps its adapter until another adapter needs the slot; the least recently used one is replaced
    first.
    """

    def __init__(self, count: int) -> None:
        self._users: list[set[Sequence]] = [set() for _ in range(count)]
        self._adapters: OrderedDict[int, Adapter | None] = OrderedDict.fromkeys(range(count))
        self._slots: dict[str, int] = {}
        """Slot by adapter digest."""
        self._pending: set[int] = set()

    def release_stopped(self) -> None:
        """Remove sequences that no longer run from the users of their slots."""
        for slot, users in enumerate(self._users):
            gone = [seq for seq in users if seq.row < 0]
            if gone:
                users.difference_update(gone)
                self._adapters.move_to_end(slot)

    def slot_for(self, adapter: Adapter) -> int | None:
        """Return the slot that has an adapter or could load it; None while other adapters are in use in all slots."""
        known = self._slots.get(adapter.digest)
        return known if known is not None else next((at for at in self._adapters if not self._users[at]), None)

    def use(self, slot: int, adapter: Adapter, seqs: Iterable[Sequence]) -> None:
        """Assign a slot, as returned by `slot_for`, to an adapter and the sequences that just started with it."""
        before = self._adapters[slot]
        if before is None or before.digest != adapter.digest:
            if self._users[slot]:
                raise InvariantError(f"slot {slot} cannot change its adapter while sequences use it")
            if before is not None:
                del self._slots[before.digest]
            self._adapters[slot], self._slots[adapter.digest] = adapter, slot
            self._pending.add(slot)
        self._adapters.move_to_end(slot)
        self._users[slot].update(seqs)

    def closed_slot(self, waiting: Iterable[Sequence]) -> int | None:
        """Return the slot that stops accepting sequences so that a waiting adapter gets it; None if no adapter waits.

        It is the slot with the fewest users.
        """
        if all(seq.adapter is None or self.slot_for(seq.adapter) is not None for seq in waiting):
            return None
        return min(range(len(self._users)), key=lambda slot: len(self._users[slot]))

    def load_pending(self, runner: ModelRunner) -> None:
        """Load newly assigned adapters into the runner, before a step that uses them.

        An adapter that cannot be loaded fails only steps with its own sequences.
        """
        for slot in sorted(self._pending):
            adapter = self._adapters[slot]
            if adapter is not None and any(seq.row >= 0 for seq in self._users[slot]):
                runner.set_adapter(slot, adapter)
                self._pending.discard(slot)


class ByAdapter:
    """Wraps a policy so that a sequence starts only with a slot for its adapter; others may overtake it meanwhile."""

    def __init__(self, inner: SchedulingPolicy, slots: AdapterSlots) -> None:
        self._inner = inner
        self._slots = slots

    @property
    def has_shares(self) -> bool:
        """Whether tenants have shares under the inner policy."""
        return self._inner.has_shares

    def added(self, seq: Sequence) -> None:
        """Note that a sequence is about to be queued."""
        self._inner.added(seq)

    def ended(self, seq: Sequence, num_output_tokens: int) -> None:
        """Note that a sequence ended by itself."""
        self._inner.ended(seq, num_output_tokens)

    def offer(self, waiting: Iterable[Sequence], start: Callable[[Sequence], bool]) -> None:
        """Offer, in the inner policy's order, the sequences that have a slot."""

        def start_in_slot(seq: Sequence) -> bool:
            if seq.adapter is None:
                return start(seq)
            slot = self._slots.slot_for(seq.adapter)
            if slot is None:
                return False
            starting = [seq, *seq.forks]
            for one in starting:
                one.adapter_slot = slot
            if not start(seq):
                return False
            self._slots.use(slot, seq.adapter, starting)
            return True

        self._inner.offer(self._with_slot(waiting), start_in_slot)

    def preemption_request(
        self, waiting: Iterable[Sequence], running: list[Sequence], num_tokens: NumTokens
    ) -> tuple[Sequence, list[Sequence]] | None:
        """Return the inner policy's request among sequences that have a slot. None is preempted to free a slot."""
        return self._inner.preemption_request(self._with_slot(waiting), running, num_tokens)

    def share_request(
        self, waiting: Iterable[Sequence], running: list[Sequence], device: Device
    ) -> tuple[Sequence, list[Sequence]] | None:
        """Return the inner policy's request among sequences that have a slot."""
        return self._inner.share_request(self._with_slot(waiting), running, device)

    def victim(self, running: list[Sequence], num_tokens: NumTokens) -> Sequence:
        """Return the inner policy's victim."""
        return self._inner.victim(running, num_tokens)

    def _with_slot(self, waiting: Iterable[Sequence]) -> Iterator[Sequence]:
        self._slots.release_stopped()
        queued = list(waiting)
        closed = self._slots.closed_slot(queued)
        for seq in queued:
            slot = None if seq.adapter is None else self._slots.slot_for(seq.adapter)
            if seq.adapter is None or (slot is not None and slot != closed):
                yield seq
