"""Jobs that this node gives back to the queue: when it leaves, when another node has more room for them, and when
one may have the adapter that they ask for.

A node takes what will probably fit. Where outputs get longer than predicted, or urgent jobs came on top, the least
urgent and newest jobs lose their places in the engine; they go to a node that has room, if there is one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from penstock.contract.errors import UnavailableError
from penstock.gpu_node.engine_worker import EngineWorker
from penstock.gpu_node.ledger import HeldJob, Ledger
from penstock.gpu_node.outbox import Outbox
from penstock.queue.broker.node import GivenBackJob, NodeBroker, Why
from penstock.queue.policy import in_order_of_retreat

log = logging.getLogger(__name__)

LOOK_S = 1.0


class LoadShedder:
    """Gives jobs back for one node, whose engine has room for so many KV tokens and sequences."""

    def __init__(
        self,
        broker: NodeBroker,
        ledger: Ledger,
        worker: EngineWorker,
        outbox: Outbox,
        *,
        kv_tokens: int,
        max_num_seqs: int,
    ) -> None:
        self._broker = broker
        self._ledger = ledger
        self._worker = worker
        self._outbox = outbox
        self._kv_tokens = kv_tokens
        self._max_num_seqs = max_num_seqs

    async def run(self) -> None:
        """Looks every now and then until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.relieve()
            except UnavailableError as error:
                log.warning("redis is away", extra={"reason": error.message})

    async def relieve(self) -> None:
        """Gives back what this node has no room for and another has, where somebody waits inside the engine."""
        surplus = self._surplus()
        if not surplus:
            return
        stats = await asyncio.wrap_future(self._worker.stats())
        if stats.num_waiting or stats.num_swapped:
            await self.give_back(surplus, "pressure")

    async def give_back(self, jobs: Sequence[HeldJob], why: Why = "drain") -> list[HeldJob]:
        """Queues jobs again, and answers those that nobody else would take: they are still held here.

        Tokens that Redis does not have yet are lost; whoever takes the job makes the same again.
        """
        wanted = [job for job in jobs if job.outcome is None]
        returns = [GivenBackJob(job.job_id, job.taken.lease, job.claim, job.most) for job in wanted]
        answers = await self._broker.give_back(returns, why)
        kept = [job for job, answer in zip(wanted, answers, strict=True) if answer == "NOBODY"]
        given = [job for job in wanted if job not in kept]
        for job in given:
            self._outbox.forget(job)
        self._ledger.counts.gave_back(why, len(given))
        if given and why != "drain":
            log.info("gave jobs back", extra={"num_jobs": len(given), "why": why})
        return kept

    def _surplus(self) -> list[HeldJob]:
        """Who would have to give way for the rest to fit, in order."""
        (*_, tokens), (*_, sequences) = self._ledger.claims()
        surplus = []
        for job in in_order_of_retreat([job for job in self._ledger if job.is_in_engine and job.outcome is None]):
            if tokens <= self._kv_tokens and sequences <= self._max_num_seqs:
                break
            surplus.append(job)
            tokens -= job.claim
            sequences -= job.num_sequences
        return surplus
