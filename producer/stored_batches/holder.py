"""The holder of batches: takes the leases of batches that no process holds, renews them, and runs the batches."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from penstock.contract.errors import DamagedRecordError, InvariantError, PenstockError, UnavailableError
from penstock.contract.webhook import EventType
from penstock.producer.client import AsyncClient
from penstock.producer.files.service import Files
from penstock.producer.stored_batches.row_client import NoCounter, RowCounter
from penstock.producer.stored_batches.stored_run import StoredBatchRun
from penstock.queue.files.batch import BatchLease, RowProblem
from penstock.queue.files.batch_records import BatchEnd, BatchRecords, BatchTakenError
from penstock.runtime.event_loop import cancel_until_done

_LOG = logging.getLogger(__package__)
LOOKS_PER_LEASE, CALLS_PER_LEASE = 6, 2
"""Looks for batches without a holder, and renewals of leases, within one lease; and the same of calls that hang."""
RELEASE_TRIES, RELEASE_PAUSE_S = 5, 0.5
"""How often a lease is released whose run found that Redis has lost parts, and the pause between two tries."""
MAX_HELD = 32
"""Batches that one process runs at once. Further ones wait for another process, or for the end of one."""
_TAKEN_AT_ONCE = 4
_EVENT_OF: dict[str, EventType] = {
    "completed": "batch.completed",
    "failed": "batch.failed",
    "expired": "batch.expired",
    "cancelled": "batch.cancelled",
}


class BatchHolder:
    """Runs batches in this process, while it sees the storage of their files."""

    def __init__(
        self, client: AsyncClient, files: Files, batches: BatchRecords, counter: RowCounter | None = None
    ) -> None:
        self._client = client
        self._files = files
        self._batches = batches
        self._counter = counter or NoCounter()
        self._lease_s = files.settings.batch_lease_s
        self._held: dict[asyncio.Task[None], BatchLease] = {}
        self._told = ""
        self._history = client.stats.histories
        """The history of Redis in which the leases were taken."""

    async def run(self) -> None:
        """Take and run batches until cancelled. Then all runs end, and another process continues them at once."""
        if self._files.settings.url is None:
            return
        try:
            while True:
                try:
                    async with asyncio.timeout(self._lease_s / CALLS_PER_LEASE):
                        await self._look()
                except TimeoutError:
                    self._tell("Redis does not answer in time")
                except PenstockError as error:
                    self._tell(error.message)
                except Exception:
                    # A defect, or records that nothing of ours has written. The next look goes on with the others.
                    _LOG.exception("a look for batches failed")
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._lease_s / LOOKS_PER_LEASE):
                        await self._batches.made.wait()
                self._batches.made.clear()
        finally:
            leases = [*self._held.values()]
            await cancel_until_done([*self._held])
            for lease in leases:
                await self._release(lease)

    async def _look(self) -> None:
        clock = asyncio.get_running_loop().time
        if (history := self._client.stats.histories) != self._history:
            # Redis may have lost parts that these runs have committed. The next holder goes on from what it has.
            self._history = history
            for lease in self._held.values():
                await self._release(lease)
                lease.is_lost = True
        elif self._held:
            now_s = clock()
            await self._batches.keep([*self._held.values()], self._lease_s, now_s)
        for task, lease in self._held.items():
            if lease.is_lost:
                task.cancel()
        if len(self._held) < MAX_HELD:
            await self._files.storage()
            now_s = clock()
            limit = min(_TAKEN_AT_ONCE, MAX_HELD - len(self._held))
            leases, ends = await self._batches.take(limit, self._lease_s, now_s)
            for lease in leases:
                task = asyncio.create_task(self._run(lease), name=f"penstock {lease.batch_id}")
                self._held[task] = lease
                task.add_done_callback(self._held.pop)
            await self._notify(ends)
        self._told = ""

    async def _notify(self, ends: Sequence[BatchEnd]) -> None:
        # A death before the note repeats it, which adds no further delivery.
        for one in ends:
            if (event := _EVENT_OF.get(one.status)) is not None:
                await self._client.webhooks.notify(event, one.batch_id, tenant=one.tenant)
        if ends:
            await self._batches.note_told(ends)

    async def _run(self, lease: BatchLease) -> None:
        facts: dict[str, Any] = {"batch_id": lease.batch_id, "token": lease.token}
        try:
            batch = await self._batches.find(lease.batch_id)
            lease.status, lease.is_paused = batch.status, batch.is_paused
            _LOG.info("a batch is run here", extra=facts | {"status": batch.status})
            services = self._client, self._files, self._batches
            run = StoredBatchRun(*services, lease, batch, lambda: len(self._held), self._counter)
            await run.run()
            _LOG.info("a batch has ended", extra=facts)
        except BatchTakenError:
            _LOG.info("another process goes on with a batch", extra=facts)
        except DamagedRecordError as error:
            _LOG.warning("a batch is damaged", extra=facts | {"reason": error.reason})
            await self._fail(lease, error)
        except UnavailableError as error:
            _LOG.warning(
                "a batch stands still until its storage or Redis is back", extra=facts | {"reason": error.reason}
            )
        except Exception as error:
            # Other batches go on. This one is taken again once the lease is over.
            _LOG.exception("the run of a batch failed", extra=facts)
            if isinstance(error, InvariantError):
                # Redis has lost parts that this run had committed. `_look` did not hear of it before the run ended, so
                # it did not release the lease. Redis may just be coming back, so a failed call is repeated.
                for _ in range(RELEASE_TRIES):
                    if await self._release(lease):
                        break
                    await asyncio.sleep(RELEASE_PAUSE_S)

    async def _fail(self, lease: BatchLease, error: PenstockError) -> None:
        # Otherwise it is taken again once the lease is over.
        with suppress(PenstockError):
            problem = RowProblem(error.code, error.message)
            await self._batches.fail(lease, [problem], self._files.settings.retention_ms)

    async def _release(self, lease: BatchLease) -> bool:
        """Release a lease, and return whether Redis noted it. Otherwise the batch is taken once the lease is over."""
        try:
            async with asyncio.timeout(1):
                await self._batches.release(lease)
        except (PenstockError, TimeoutError):
            return False
        return True

    def _tell(self, reason: str) -> None:
        if reason != self._told:
            _LOG.warning("this process takes no batches at the moment", extra={"reason": reason})
        self._told = reason
