"""Stored batches in a Celery worker: its process takes leases of them as gateways do.

`installation.py` names this step by a text, because this package imports that of the Celery app.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Any

from celery import bootsteps

from penstock.contract.errors import PenstockError
from penstock.producer.batch.installation import tasks_of
from penstock.producer.client import AsyncClient
from penstock.producer.client.loop_thread import LoopThread
from penstock.producer.files.service import Files
from penstock.producer.files.storage import FilesSettings
from penstock.producer.stored_batches.holder import BatchHolder
from penstock.runtime.event_loop import cancel_until_done
from penstock.runtime.settings import redis_url_of

_LOG = logging.getLogger(__package__)
CONNECT_PAUSE_S = 5.0


class RunsBatches(bootsteps.StartStopStep):  # type: ignore[misc]  # celery ships no types
    """Runs stored batches on a thread of the worker's own process, with any kind of pool."""

    # Child processes are forked before there is another thread. When the worker stops, leases are given back first.
    requires = ("celery.worker.components:Pool",)

    def __init__(self, worker: Any, **_: Any) -> None:
        super().__init__(worker)
        self._settings = FilesSettings.load()
        tasks = tasks_of(worker.app)
        self._redis_url = None if tasks is None else tasks.redis_url
        self._counter = None if tasks is None else tasks.metrics
        self._thread: LoopThread | None = None
        self._task: asyncio.Task[None] | None = None

    def include_if(self, worker: Any) -> bool:
        """Return whether the worker can see any files."""
        if self._settings.url is None:
            _LOG.info("this worker runs no stored batches", extra={"reason": "PENSTOCK_FILES_URL is not set"})
        return self._settings.url is not None

    def start(self, worker: Any) -> None:
        """Begin to take batches."""
        url = redis_url_of(self._redis_url)
        self._thread = LoopThread()
        self._thread.call(self._begin(url))

    def stop(self, _: Any) -> None:
        """Give the batches back; other processes go on with them at once."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.stop(self._end())

    terminate = stop

    async def _begin(self, redis_url: str) -> None:
        self._task = asyncio.create_task(self._run(redis_url), name="penstock batches")

    async def _end(self) -> None:
        if self._task is not None:
            await cancel_until_done([self._task])

    async def _run(self, redis_url: str) -> None:
        while True:
            try:
                client = await AsyncClient(redis_url).connect()
                break
            except PenstockError as error:
                _LOG.warning("this worker takes no batches at the moment", extra={"reason": error.reason})
            await asyncio.sleep(CONNECT_PAUSE_S)
        files = Files(self._settings, client.files)
        try:
            _LOG.info("this worker takes batches", extra={"files": self._settings.url})
            await BatchHolder(client, files, client.batches, self._counter).run()
        finally:
            files.close()
            with suppress(PenstockError):
                await client.close()
