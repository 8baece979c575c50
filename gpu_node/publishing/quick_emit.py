"""The fast path of tokens to Redis: one emit call whose answers are handled without waking a task."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from penstock.gpu_node.held_job import HeldJob
from penstock.gpu_node.monitor.counters import NodeCounts
from penstock.gpu_node.publishing.emit_batches import fits_one_call, size_of
from penstock.gpu_node.publishing.send_cost import SendCost
from penstock.queue.broker.node import Emission, NodeBroker
from penstock.queue.msgpack_codec import new_pack

OnAnswers = Callable[[Sequence[HeldJob], Sequence[Emission], Sequence[str] | None], None]
"""Called with the answers to the emissions of these jobs; None: the call failed."""


class QuickEmit:
    """Emits what running jobs have, by one call at a time, and learns what that costs.

    It leaves to the outbox what needs more: ended jobs, long prompts to pack, large backlogs, and failed calls.
    """

    def __init__(
        self,
        broker: NodeBroker,
        counts: NodeCounts,
        cost: SendCost,
        *,
        on_answers: OnAnswers,
        on_idle: Callable[[], None],
    ) -> None:
        """`on_answers` handles the answers, `on_idle` may start the next call. Neither may raise."""
        self._broker = broker
        self._counts = counts
        self._cost = cost
        self._on_answers = on_answers
        self._on_idle = on_idle
        self._pack = new_pack()
        self.is_in_flight = False
        """Whether a call is unanswered, or its answers are being handled."""

    def start(self, jobs: Sequence[HeldJob]) -> bool:
        """Send what these jobs have. Return False if nothing was sent."""
        if self.is_in_flight or not fits_one_call(len(jobs), 0):
            return False
        if any(job.outcome is not None or job.has_unsealed_prompt for job in jobs):
            return False
        began_s, cpu_s = time.monotonic(), time.thread_time()
        emissions = [job.emission(self._pack) for job in jobs]
        if not fits_one_call(len(emissions), sum(map(size_of, emissions))):
            return False

        def receive(answers: Sequence[str] | None) -> None:
            self._counts.emits.note(time.monotonic() - began_s)
            self._on_answers(jobs, emissions, answers)
            if answers is not None:
                # This includes other work of the event loop in that time, which is little compared with a send.
                self._note(len(jobs), time.thread_time() - cpu_s)
            self.is_in_flight = False
            self._on_idle()

        self.is_in_flight = self._broker.start_emit(emissions, receive)
        return self.is_in_flight

    def _note(self, num_chunks: int, cpu_s: float) -> None:
        self._cost.note(num_chunks, cpu_s)
        self._counts.sending.note(num_chunks, cpu_s)
