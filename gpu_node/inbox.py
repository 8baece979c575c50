"""From Redis to this node: take what fits."""

from __future__ import annotations

import logging
import secrets
import time

from penstock.contract.errors import UnavailableError
from penstock.gpu_node.doorbell import Bell
from penstock.gpu_node.job_intake import JobIntake
from penstock.gpu_node.ledger import HeldJob, Ledger
from penstock.gpu_node.outbox import Outbox
from penstock.queue.broker.node import Capacity, NodeBroker, TakeAnswer
from penstock.queue.broker.retry import pauses

log = logging.getLogger(__name__)

MAX_TAKEN_AT_ONCE = 128
"""Of take.lua: after a call that reached it there may be more."""
IDLE_TAKE_S = 1.0
"""Doorbells may be lost; the queue is looked at this often all the same."""


class JobInbox:
    """Takes jobs for one node."""

    def __init__(
        self,
        broker: NodeBroker,
        ledger: Ledger,
        bell: Bell,
        outbox: Outbox,
        reception: JobIntake,
        *,
        room: tuple[int, int],
    ) -> None:
        """`room`: KV tokens and sequences of the whole node."""
        self._broker = broker
        self._ledger = ledger
        self._kv_tokens, self._max_num_seqs = room
        self._outbox = outbox
        self._reception = reception
        self._bell = bell
        self._call = 0
        self._nonce = ""
        self.answered_call = 0
        """Last take whose answer has arrived: jobs of later ones are not yet known to us."""

    @property
    def kv_tokens_unclaimed(self) -> int:
        """KV tokens neither used nor still needed by jobs already taken."""
        return self._room().kv_tokens[-1]

    @property
    def hears_doorbell(self) -> bool:
        """Whether the queue can ring."""
        return self._bell.is_heard

    @property
    def has_backlog(self) -> bool:
        """Whether jobs waited when the queue was last seen."""
        return self._bell.depth > 0

    @property
    def num_tokenizer_failures(self) -> int:
        """Prompts at which the tokenizer failed, other than by refusing them."""
        return self._reception.num_tokenizer_failures

    async def run(self) -> None:
        """Takes until cancelled. Raises SweptError when the pool believes this node dead."""
        patience = pauses()
        wait_s = 0.0
        try:
            while True:
                await self._bell.wait(wait_s)
                try:
                    wait_s = await self._take()
                    patience = pauses()
                except UnavailableError as error:
                    log.warning("redis is away", extra={"reason": error.message})
                    wait_s = next(patience)
        finally:
            await self._reception.close()

    async def _take(self) -> float:
        """One call; the same call again until its answer has arrived. Answers how long to sleep."""
        if self._call == self.answered_call:
            self._call += 1
            self._nonce = secrets.token_hex(16)
        answer = await self._broker.take(self._call, self._nonce, self._room(), hold_ms=self._ledger.hold_ms)
        jobs = self._hold(answer)
        self._bell.depth = sum(answer.depth)
        for job in jobs:
            self._reception.admit(job)
        if len(jobs) == MAX_TAKEN_AT_ONCE:
            return 0.0
        return min(IDLE_TAKE_S, answer.again_in_ms / 1000) if answer.again_in_ms else IDLE_TAKE_S

    def _room(self) -> Capacity:
        """What each class could have: less urgent jobs would give way to it."""
        tokens, sequences = self._ledger.claims()
        return Capacity(
            *(_left_of(self._kv_tokens, tokens), _left_of(self._max_num_seqs, sequences)),
            *(self._kv_tokens, self._max_num_seqs),
        )

    async def close(self) -> None:
        """Learns what a call that was cut short had taken, so that it can be given back."""
        if self._call != self.answered_call:
            nothing = Capacity((0,) * 3, (0,) * 3, self._kv_tokens, self._max_num_seqs)
            self._hold(await self._broker.take(self._call, self._nonce, nothing))

    def _hold(self, answer: TakeAnswer) -> list[HeldJob]:
        jobs, now_s = [HeldJob(taken) for taken in answer.jobs], time.monotonic()
        for job in jobs:
            if job.taken.deadline_in_ms:
                job.expires_s = now_s + job.taken.deadline_in_ms / 1000
            if (older := self._ledger.get(job.job_id)) is not None:
                self._outbox.drop(older)
            self._ledger.add(job)
        counts = self._ledger.counts
        counts.taken += len(jobs)
        counts.taken_over += sum(bool(job.taken.num_chunks or job.taken.losses) for job in jobs)
        self.answered_call = self._call
        return jobs


def _left_of(whole: int, claims: tuple[int, int, int]) -> tuple[int, int, int]:
    first, second, third = (max(0, whole - claimed) for claimed in claims)
    return first, second, third
