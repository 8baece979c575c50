"""Jobs that a node gives back to the queue: when it leaves, is overloaded, cannot run them, or lost their step.

A node takes the jobs that will probably fit. If outputs become longer than predicted, or urgent jobs arrive, the engine
preempts the least urgent and newest jobs. Those jobs move to a node with free capacity, if there is one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from penstock.contract.errors import DamagedDataError, UnavailableError
from penstock.gpu_node.engine.worker import EngineWorker
from penstock.gpu_node.jobs.held_job import HeldJob
from penstock.gpu_node.jobs.held_jobs import HeldJobs, JobReports
from penstock.gpu_node.publishing.outbox import Outbox
from penstock.queue.broker.node import GivenBackJob, LeaseLostError, NodeBroker, Why
from penstock.queue.policy import preemption_order

log = logging.getLogger(__package__)


LOOK_S = 1.0
"""Interval between two checks for overload."""


class LoadShedder:
    """Gives a node's jobs back. The node's capacity is `kv_tokens` KV tokens and `max_num_seqs` sequences."""

    def __init__(
        self,
        broker: NodeBroker,
        held_jobs: HeldJobs,
        worker: EngineWorker,
        reports: JobReports,
        outbox: Outbox,
        *,
        kv_tokens: int,
        max_num_seqs: int,
    ) -> None:
        self._broker = broker
        self._held_jobs = held_jobs
        self._worker = worker
        self._reports = reports
        self._outbox = outbox
        self._kv_tokens = kv_tokens
        self._max_num_seqs = max_num_seqs
        self._loop = asyncio.get_running_loop()
        self._lost: asyncio.Queue[frozenset[str]] = asyncio.Queue()

    def note_lost(self, requests: frozenset[str]) -> None:
        """Note the requests, by lease, of a step that was lost with a rank. Runs on the engine's thread.

        Raises RuntimeError if the event loop is closed.
        """
        self._loop.call_soon_threadsafe(self._lost.put_nowait, requests)

    async def give_back_lost(self) -> None:
        """Give back the jobs of lost steps, each with a loss, while the engine starts its ranks again. Never returns.

        The engine continues the other jobs. It also continues these if Redis is away.
        """
        while True:
            lost = await self._lost.get()
            jobs = [job for job in self._held_jobs if job.taken.lease in lost]
            try:
                await self.give_back(jobs, "lost")
            except (UnavailableError, DamagedDataError, LeaseLostError) as error:
                log.warning("jobs of a lost step stay here", extra={"num_jobs": len(jobs), "reason": str(error)})

    async def run(self) -> None:
        """Shed load once a second until canceled."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.shed_load()
                self._held_jobs.round_done("give_back")
            except UnavailableError as error:
                self._held_jobs.redis_failed("give_back", error)
            except DamagedDataError as error:
                self._held_jobs.round_failed("give_back", error)

    async def shed_load(self) -> None:
        """If sequences wait inside the engine, give back the jobs that exceed its capacity and fit on another node."""
        surplus = self._surplus()
        if not surplus:
            return
        stats = await asyncio.wrap_future(self._worker.stats())
        if stats.num_waiting or stats.num_swapped:
            await self.give_back(surplus, "pressure")

    async def give_back(self, jobs: Sequence[HeldJob], why: Why = "drain") -> list[HeldJob]:
        """Queue jobs again. Return the jobs that no other node would take; this node still holds them.

        Tokens that Redis does not have yet are lost; the next node generates the same tokens again.
        """
        wanted = [job for job in jobs if job.outcome is None]
        told = "drain" if why == "handover" else why
        returns = [
            GivenBackJob(job.job_id, job.taken.lease, job.expected_cost, job.max_kv_tokens, self._preemptions_of(job))
            for job in wanted
        ]
        answers = await self._broker.give_back(returns, why)
        kept = [job for job, answer in zip(wanted, answers, strict=True) if answer == "KEEP"]
        given = [job for job in wanted if job not in kept]
        for job in given:
            self._reports.gave_back(job, told)
            self._outbox.forget(job)
        self._held_jobs.counts.gave_back(told, len(given))
        if given and told != "drain":
            log.info("returned jobs to the queue", extra={"num_jobs": len(given), "why": why})
        return kept

    def _preemptions_of(self, job: HeldJob) -> int:
        return job.num_preemptions + self._worker.num_preemptions(job.taken.lease)

    def _surplus(self) -> list[HeldJob]:
        """Return the jobs to preempt so that the rest fits, in the order of preemption."""
        (*_, tokens), (*_, sequences) = self._held_jobs.expected_usage()
        surplus = []
        for job in preemption_order([job for job in self._held_jobs if job.is_in_engine and job.outcome is None]):
            if tokens <= self._kv_tokens and sequences <= self._max_num_seqs:
                break
            surplus.append(job)
            tokens -= job.expected_kv_tokens
            sequences -= job.num_sequences
        return surplus
