"""The queue's scheduling policies inside an engine, with the KV use of each tenant."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from penstock.contract.job import PREDICTED_OUTPUT_TOKENS
from penstock.gpu_node.engine.config import EngineConfig
from penstock.gpu_node.engine.policy.policy import (
    AdapterSlots,
    ByAdapter,
    FirstComeFirstServed,
    NumTokens,
    SchedulingPolicy,
    in_turns,
)
from penstock.gpu_node.engine.policy.shares import SharedDevice, share_request
from penstock.gpu_node.engine.sequence import Sequence
from penstock.queue.job_cost import HOLD_MS, LengthPredictor, learned_hold_ms
from penstock.queue.policy import TURN, PolicyConfig, choose, foremost, preemption_order, victims_of
from penstock.queue.policy_state import PolicyState

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
