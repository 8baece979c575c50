"""Small steps: between the steps of all sequences, tenants with few of them decode alone.

A step computes a token for each running sequence, so a tenant with one sequence waits for all sequences of the others.
Such a step may take much longer than a step of the tenant's own would. Then the tenant gets further steps, so that the
average time between its tokens stays within a bound. Where a large step takes hardly longer than a small one, as on
most GPUs, there are no small steps.
"""

from __future__ import annotations

import math
from collections import Counter

from penstock.gpu_node.engine.scheduler.running import RunningBatch
from penstock.gpu_node.engine.scheduler.step_time import StepTime, StepWork
from penstock.gpu_node.engine.steps import Step

MAX_SLOWDOWN = 3.0
"""A tenant's average time between tokens is at most this multiple of its time alone ÷ its share of the weights."""
MIN_REMAINDER = 2
"""The average time between tokens stays at this multiple of a small step, so these take less than half of all time."""


class SmallSteps:
    """Counts the small steps that follow each step of all sequences, and chooses the sequences in them."""

    def __init__(self, batch: RunningBatch, step_time: StepTime) -> None:
        self._batch = batch
        self._time = step_time
        self._tenants: set[str] = set()
        self._num_due = 0

    def note_full(self, step: Step) -> None:
        """Decide after a step of all sequences which tenants get small steps, and how many."""
        self._tenants, self._num_due = set(), 0
        weights = self._batch.weights
        if len(weights) < 2:
            return
        decodes = ((step.ends - step.starts) == 1).nonzero()[0].tolist()
        counts = Counter(step.seqs[i].tenant for i in decodes)
        full_ms, total = self._time.step_ms(StepWork.of(step, 0)), sum(weights.values())
        bounds = {
            tenant: MAX_SLOWDOWN * self._time.decode_ms(count) * total / weights[tenant]
            for tenant, count in counts.items()
            if tenant in weights
        }
        self._tenants = {tenant for tenant, bound_ms in bounds.items() if bound_ms < full_ms}
        if not self._tenants:
            return
        small_ms = self._time.decode_ms(sum(counts[tenant] for tenant in self._tenants))
        bound_ms = max(min(bounds[tenant] for tenant in self._tenants), MIN_REMAINDER * small_ms)
        self._num_due = max(0, math.ceil((full_ms - bound_ms) / (bound_ms - small_ms)))

    def take(self) -> int:
        """Return the number of sequences in the small step that is due, after moving them to the front; 0 if none is.

        They lack one token each.
        """
        if not self._num_due:
            return 0
        self._num_due -= 1
        batch = self._batch
        lacking = batch.table.num_tokens[batch.rows] - batch.table.num_computed[batch.rows]
        small = [i for i in (lacking == 1).nonzero()[0].tolist() if batch.seqs[i].tenant in self._tenants]
        if not small or len(small) == len(batch.seqs):
            self._num_due = 0
            return 0
        batch.put_first(small)
        return len(small)
