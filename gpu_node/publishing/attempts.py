"""Further attempts of jobs: after an error of this node they return to the queue, and outputs are checked.

Nothing here is on the path of tokens: a job without retries and checks costs a comparison at its end.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import socket
import subprocess
from collections import deque
from weakref import WeakValueDictionary

import uuid_utils

from penstock.contract.job import pool_of
from penstock.contract.output import Outcome
from penstock.contract.retries import RETRY_CAUSES, OutputCheck
from penstock.gpu_node.jobs.held_job import HeldJob
from penstock.gpu_node.publishing import check_worker
from penstock.queue.broker.connection import with_retries
from penstock.queue.broker.node import GivenBackJob, NodeBroker, Successor
from penstock.queue.wire import pack, unpack_map
from penstock.runtime.event_loop import Threads
from penstock.runtime.socket_process import end_process, start_process

log = logging.getLogger(__package__)

MAX_CHECKS = 2
"""Processes that check outputs. Each makes one check at a time, and a tenant has one check at a time."""


class _CheckProcess:
    """One process that checks outputs. A check that ends it costs its own job an attempt at most."""

    def __init__(self) -> None:
        own, child = socket.socketpair()
        with child:
            self._process: subprocess.Popen[bytes] = start_process(check_worker.__name__, child, os.environ)
        self._socket = own

    def ask(self, message: bytes) -> tuple[str, str] | None:
        """Return the verdict; None if the check has ended the process."""
        try:
            check_worker.write(self._socket, message)
            answer = check_worker.read(self._socket)
        except OSError:
            answer = None
        if answer is None:
            return None
        kind, reason = json.loads(answer)
        return kind, reason

    def close(self) -> None:
        """End the process."""
        self._socket.close()
        end_process(self._process)


class OutputChecks:
    """The processes that check outputs. The first check of a node starts one, which takes about half a second."""

    def __init__(self) -> None:
        self._threads = Threads(MAX_CHECKS)
        self._idle: deque[_CheckProcess] = deque()
        self._is_closed = False
        # Keyed by tenant; no text of a request.
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def verdict_of(self, check: OutputCheck, texts: list[str], tenant: str) -> tuple[str, str]:
        """Return whether all texts match, see `check_worker`, and why not. Raises OSError without a process."""
        message = json.dumps({"check": check.model_dump(), "texts": texts}).encode(errors="surrogatepass")
        async with self._turns.setdefault(tenant, asyncio.Semaphore(1)):
            return await self._threads.run(lambda: self._ask(message))

    def _ask(self, message: bytes) -> tuple[str, str]:
        try:
            process = self._idle.pop()
        except IndexError:
            process = _CheckProcess()
        answer = process.ask(message)
        if answer is None or self._is_closed:
            process.close()
        else:
            self._idle.append(process)
        if answer is None:
            limit = f"{check_worker.CPU_S:g} s of CPU time, or {check_worker.MAX_GROWTH_BYTES >> 20} MiB of memory"
            return check_worker.COSTLY, f"the check takes more than {limit}"
        return answer

    def close(self) -> None:
        """End the processes that do not check; the others end with their check."""
        self._is_closed = True
        while self._idle:
            self._idle.popleft().close()


class Attempts:
    """Decides whether a job has another attempt, and hands it over to that. The queue counts the attempts."""

    def __init__(self, broker: NodeBroker, *, max_attempts: int) -> None:
        """`max_attempts`: those of a job that states none."""
        self._broker = broker
        self._max_attempts = max_attempts
        self._checks = OutputChecks()

    def may_follow(self, job: HeldJob, code: str) -> bool:
        """Return whether a job that ends with this code may have another attempt, as far as this node knows."""
        most = self._max_attempts if job.max_attempts is None else job.max_attempts
        return most > 1 and code in (RETRY_CAUSES if job.retry_on is None else job.retry_on) and code in RETRY_CAUSES

    async def give_back(self, job: HeldJob, code: str, num_preemptions: int) -> str:
        """Return a job to the queue for another attempt. KEEP: it has none. Waits while Redis is away."""
        given = GivenBackJob(
            job.job_id, job.taken.lease, job.expected_cost, job.max_kv_tokens, num_preemptions, code=code
        )
        (answer,) = await with_retries(lambda: self._broker.give_back([given], "failed"), math.inf)
        return answer

    async def refusal_of(self, job: HeldJob) -> Outcome | None:
        """Return how a complete job ends whose check refuses its output; None if the check accepts it."""
        if job.check is None:
            return None
        try:
            kind, reason = await self._checks.verdict_of(job.check, job.texts(), job.taken.tenant)
        except OSError as error:
            log.error("outputs cannot be checked", extra={"job_id": job.job_id, "reason": str(error)})
            return Outcome("failed", "internal_error", "the node could not check the output", "check_output")
        message = f"check_output: {reason}"
        if kind == check_worker.REJECTED:
            return Outcome("failed", "output_rejected", message, "check_output")
        if kind == check_worker.COSTLY:
            return Outcome("failed", "too_costly", message, "check_output")
        return None if kind == check_worker.ACCEPTED else Outcome("failed", "invalid_request", message, "check_output")

    async def successor_of(self, job: HeldJob) -> Successor | None:
        """Return the job that is to take the place of one whose output was refused: a new id, and so a new seed."""
        (data,) = await with_retries(lambda: self._broker.requests([job.job_id]), math.inf)
        if data is None:
            return None
        members = unpack_map(data)
        # The caller's seed would give the same output again.
        if (params := members.get("params")) and "seed" in params:
            params["seed"] = (params["seed"] + 1) % (1 << 63)
        # A trace is its first job's.
        members.pop("trace", None)
        members["spent"] = job.total_usage.all_counts()
        return Successor(f"{pool_of(job.job_id)}.{uuid_utils.uuid7()}", pack(members))

    def close(self) -> None:
        """End the processes that check outputs."""
        self._checks.close()
