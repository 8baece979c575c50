"""The queue's policies inside an engine: who of its sequences starts, who gives way, what each tenant has used."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from penstock.gpu_node.engine.config import EngineConfig
from penstock.gpu_node.engine.policy.adapter_slots import AdapterSlots, ByAdapter
from penstock.gpu_node.engine.policy.base import FirstComeFirstServed, SchedulingPolicy
from penstock.gpu_node.engine.policy.length_predictor import LengthPredictor
from penstock.gpu_node.engine.sequence import Sequence
from penstock.queue.admission import PREDICTED_OUTPUT_TOKENS
from penstock.queue.policy import (
    HOLD_MS,
    PolicyConfig,
    choose,
    foremost,
    in_order_of_retreat,
    learned_hold_ms,
    victims_of,
)
from penstock.queue.policy_state import PolicyState

ORDERING_QUANTILE = 0.5
"""Whom to serve first is a question of what is likely, not of what is safe to reserve."""


@dataclass(frozen=True, slots=True)
class _Start:
    """What a sequence had used when it was started, and what its tenant was charged then."""

    kv_ms: float
    charge: float
    at_ms: float


class ByPolicy:
    """A policy as a scheduler's discipline. Who was preempted stands in line by its age and class like everybody else.

    A tenant is charged a start by predicted KV-token-milliseconds ÷ its weight; when the sequence stops, by what it
    really used.
    """

    def __init__(self, policy: PolicyConfig, now_ms: Callable[[], float]) -> None:
        self._policy = policy
        self._now_ms = now_ms
        self._standing = PolicyState(policy.share_window_ms)
        self._predictor = LengthPredictor(ORDERING_QUANTILE)
        self._started: dict[Sequence, _Start] = {}
        self._hold_ms = HOLD_MS

    def added(self, seq: Sequence) -> None:
        """A sequence is about to be queued."""
        limit = seq.end_rule.max_tokens
        known = self._predictor.predict(seq.tenant, seq.num_prompt_tokens, limit)
        seq.predicted_tokens = known or min(limit, PREDICTED_OUTPUT_TOKENS)
        seq.submitted_ms = self._now_ms()

    def ended(self, seq: Sequence, num_output_tokens: int) -> None:
        """A sequence came to its own end."""
        limit, predicted = seq.end_rule.max_tokens, seq.predicted_tokens
        self._predictor.ended(seq.tenant, seq.num_prompt_tokens, limit, num_output_tokens, predicted)

    def offer(self, waiting: Iterable[Sequence], start: Callable[[Sequence], bool]) -> None:
        """In the policy's order; behind one without room others, until it is old enough to be waited for."""
        queued, now_ms = self._looked_at(waiting), self._now_ms()

        def fits(seq: Sequence, urgency: int) -> bool:
            if not start(seq):
                return False
            for one in (seq, *seq.forks):
                one.urgency = urgency
                self._started[one] = _Start(one.kv_ms, self._charge(one), now_ms)
            return True

        choose(queued, self._policy, self._standing, now_ms, fits)

    def pressing(self, waiting: Iterable[Sequence], running: list[Sequence]) -> tuple[Sequence, list[Sequence]] | None:
        """The first in line, where less urgent ones run."""
        least_urgent = max((seq.urgency for seq in running), default=0)
        now_ms, queued = self._now_ms(), list(waiting)
        old_ms = now_ms - self._policy.aging_ms
        # Asked at every step, and nearly always answered by this.
        if not any(seq.priority < least_urgent or seq.submitted_ms <= old_ms for seq in queued):
            return None
        first = foremost(self._looked_at(queued), self._policy, self._standing, now_ms)
        if first is None:
            return None
        newcomer, urgency = first
        victims = victims_of(urgency, running)
        return (newcomer, victims) if victims else None

    def victim(self, running: list[Sequence]) -> Sequence:
        """The newest of the least urgent ones."""
        return in_order_of_retreat(running)[0]

    def _looked_at(self, waiting: Iterable[Sequence]) -> list[Sequence]:
        """Those that wait, after what came, went and stopped since the last look has been entered into the turns."""
        queued = list(waiting)
        present = dict.fromkeys((seq.priority, seq.tenant) for seq in queued)  # in the order in which they came
        for priority, tenant in present:
            self._standing.turns[priority].enter(tenant)
        self._settle(set(queued))
        for priority, turns in enumerate(self._standing.turns):
            for tenant in [tenant for tenant in turns.times if (priority, tenant) not in present]:
                turns.leave(tenant)
        for seq in queued:
            seq.charge = sum(self._charge(one) for one in (seq, *seq.forks))
        return queued

    def _charge(self, seq: Sequence) -> float:
        return seq.cost * self._hold_ms / seq.weight

    def _settle(self, queued: set[Sequence]) -> None:
        """Correct what was charged for those that stopped, and how long a token of cost is held by what it was."""
        for seq in [seq for seq in self._started if seq.row < 0]:
            start = self._started.pop(seq)
            used = seq.kv_ms - start.kv_ms
            too_little = used / seq.weight - start.charge
            self._standing.correct(seq.priority, seq.tenant, too_little, self._now_ms(), start.at_ms)
            if seq not in queued:
                self._hold_ms = learned_hold_ms(self._hold_ms, used, seq.cost)


def discipline_of(config: EngineConfig, places: AdapterSlots) -> SchedulingPolicy:
    """What an engine's settings say."""
    discipline: SchedulingPolicy = FirstComeFirstServed()
    if config.scheduling_policy != "fcfs":
        policy = PolicyConfig(config.scheduling_policy, config.aging_ms, config.bypass_ms)
        discipline = ByPolicy(policy, lambda: time.monotonic() * 1e3)
    return ByAdapter(discipline, places) if config.num_adapter_places else discipline


def note_held(running: Iterable[Sequence], held_ms: float, block_size: int) -> None:
    """Sequences held their blocks for so long. A shared block counts for each that holds it."""
    for seq in running:
        seq.kv_ms += len(seq.blocks) * block_size * held_ms
