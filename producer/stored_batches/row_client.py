"""Submits the rows of one batch: as its tenant, on the terms of its API key, and only under a valid lease."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol, TypeVar, Unpack

from penstock.contract.errors import BusyError, NotFoundError, UnavailableError
from penstock.contract.job import SubmitOptions
from penstock.contract.priority import ClassName, Priority, allowed_class
from penstock.contract.tenant import UNLIMITED, ApiKey
from penstock.producer.client import AsyncClient, AsyncJob
from penstock.producer.client.request import Prompt
from penstock.queue.broker.producer import ServedPool
from penstock.queue.files.batch import BatchLease, BatchRecord, PartCounts
from penstock.queue.files.batch_records import BatchRecords, BatchTakenError

_LOG = logging.getLogger(__package__)
_RETRY_S = 2.0
HIGHEST_CLASS: ClassName = "standard"
"""Of the rows of a flow that was made without an API key."""
KEY_TTL_S = 2.0
"""Seconds for which the API key of a batch is remembered."""


class RowCounter(Protocol):
    """What a process counts of the rows that it runs."""

    def submitted(self) -> None:
        """Count a job that the queue accepted."""

    def refused(self) -> None:
        """Count a row that was not submitted, because the queue was full or away."""

    def stored(self, counts: PartCounts) -> None:
        """Count rows whose answers or errors are stored now."""


class NoCounter:
    """Counts nothing."""

    def submitted(self) -> None:
        return

    def refused(self) -> None:
        return

    def stored(self, counts: PartCounts) -> None:
        return


class RowClient:
    """The `Submitter` of a batch's rows."""

    def __init__(self, client: AsyncClient, batches: BatchRecords, batch: BatchRecord, lease: BatchLease) -> None:
        self._client = client
        self._batches = batches
        self._batch = batch
        self._lease = lease
        self._key: ApiKey | None = None
        self._key_until_s = 0.0
        self.pools_used: set[str] = set()

    async def submit(self, prompt: Prompt, /, **options: Unpack[SubmitOptions]) -> AsyncJob:
        """Submit a row's job. Raises UnavailableError while the key of the batch may not be used."""
        # A holder that slept through its lease must not run rows that the next holder has stored and acknowledged.
        require_lease(self._lease)
        key = await self.key()
        if key is not None:
            options["model"] = key.model_of(options.get("model") or "") or None
            options["hides_models"] = bool(key.models)
        if isinstance(asked := options.get("priority"), Priority):
            limits = (HIGHEST_CLASS, "a flow without an API key") if key is None else (key.highest_class, "the API key")
            allowed_class(asked.label, *limits)
        spec = self._batch.spec
        if options.get("max_attempts") is None:
            options["max_attempts"] = spec.max_attempts
        if options.get("retry_backoff_s") is None:
            options["retry_backoff_s"] = spec.retry_backoff_s
        options["tenant"] = self._batch.tenant
        options["terms"] = UNLIMITED if key is None else key.metered_terms
        options["needs_reader"] = False
        job = await self._client.submit(prompt, **options)
        self.pools_used.add(job.pool)
        return job

    async def ack(self, *job_ids: str) -> int:
        """Free the results of jobs whose rows are stored."""
        return await self._client.ack(*job_ids, tenant=self._batch.tenant)

    async def pools(self) -> Mapping[str, ServedPool]:
        """Return the served pools."""
        return await self._client.pools()

    async def key(self) -> ApiKey | None:
        """Return the batch's API key; None if it was made without one. Raises UnavailableError for a revoked one."""
        key_id = self._batch.spec.key_id
        if not key_id:
            return None
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._key_until_s:
            self._key, self._key_until_s = await self._batches.key(key_id), now_s + KEY_TTL_S
        key = self._key
        if key is None or key.is_revoked:
            message = f"the API key {key_id} of the batch is revoked, so no further rows are submitted"
            raise UnavailableError(message, code="key_revoked", retry_after_ms=5000)
        return key


class BatchStoppedError(Exception):
    """The batch is canceled, or its window is over."""


def require_lease(lease: BatchLease) -> None:
    """Raise BatchTakenError if another process may hold the batch by now."""
    if lease.is_lost or asyncio.get_running_loop().time() >= lease.valid_until_s:
        raise BatchTakenError(f"the lease of {lease.batch_id} is over")


T = TypeVar("T")


class BatchPatience:
    """Repeats calls while the storage or Redis is away. The batch says why it waits."""

    def __init__(self, lease: BatchLease) -> None:
        self._lease = lease

    async def __call__(self, call: Callable[[], Awaitable[T]], is_over: Callable[[], bool] = lambda: False) -> T:
        """Return the answer of `call`. Raises BatchStoppedError once `is_over`, and BatchTakenError without a lease."""
        while True:
            require_lease(self._lease)
            if is_over():
                raise BatchStoppedError
            try:
                return await call()
            except NotFoundError:
                raise
            except (UnavailableError, BusyError) as error:
                self._lease.waiting = error.message
                _LOG.warning("a batch waits", extra={"batch_id": self._lease.batch_id, "reason": error.reason})
                await asyncio.sleep(_RETRY_S)
