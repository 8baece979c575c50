"""The node's side of `penstock profile`: it records for some seconds and sends what it recorded."""

from __future__ import annotations

import asyncio
import logging
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

from penstock.contract.errors import PenstockError
from penstock.gpu_node.engine.profiler import EngineProfile, EngineProfiler, ProfiledEngine
from penstock.gpu_node.engine.records import EngineStats
from penstock.gpu_node.engine_worker import EngineLike, EngineWorker
from penstock.gpu_node.monitor.chrome_trace import chrome_trace
from penstock.gpu_node.monitor.stack_samples import StackSamples, record_stacks
from penstock.gpu_node.threads import Threads
from penstock.queue.broker.profiles import (
    MAX_FILE_BYTES,
    MAX_PROFILE_S,
    OPERATIONS,
    TRACE,
    ProfileBroker,
    ProfileRequest,
    ProfileSummary,
)

log = logging.getLogger(__name__)

LOOK_S = 0.05
"""Interval at which a profile looks whether the engine has recorded as much as it keeps."""


class NodeProfiler:
    """Answers an operator's requests for a profile, one after another."""

    def __init__(
        self, broker: ProfileBroker, worker: EngineWorker, engine: EngineLike, pool: str, node_id: str
    ) -> None:
        self._broker = broker
        self._worker = worker
        self._engine: EngineProfiler | None = engine.profiler if isinstance(engine, ProfiledEngine) else None
        self._pool = pool
        self._node_id = node_id
        self._asked = asyncio.Event()
        self._threads = Threads()

    def ring(self) -> None:
        """Look for a request."""
        self._asked.set()

    async def run(self) -> None:
        """Answer requests until canceled."""
        while True:
            await self._asked.wait()
            self._asked.clear()
            try:
                request = await self._broker.request(self._node_id)
                if request is not None:
                    await self._answer(request)
            except PenstockError as error:
                log.warning("profile.failed", extra={"reason": error.message})

    async def _answer(self, request: ProfileRequest) -> None:
        log.info("profile.started", extra={"profile": request.id, "seconds": request.seconds})
        try:
            summary, files = await self._record(min(max(0.0, request.seconds), MAX_PROFILE_S))
        except Exception as error:
            log.warning("profile.failed", extra={"reason": repr(error)})
            summary, files = ProfileSummary(self._node_id, problem=f"the profile failed: {error!r}"), []
        await self._broker.send(self._pool, request, summary, files)
        log.info("profile.sent", extra={"profile": request.id, "steps": summary.steps})

    async def _record(self, seconds: float) -> tuple[ProfileSummary, list[bytes]]:
        before, started_s = await self._stats(), time.monotonic()
        stopped = threading.Event()
        sampling = asyncio.create_task(self._threads.run(partial(record_stacks, stopped)))
        profile = EngineProfile((), has_operations=False)
        try:
            if self._engine is not None:
                await asyncio.wrap_future(self._worker.call(self._engine.start))
            try:
                await self._wait(started_s + seconds)
            finally:
                if self._engine is not None:
                    profile = await asyncio.wrap_future(self._worker.call(self._engine.stop))
        finally:
            stopped.set()
            samples = await sampling
        after, took_s = await self._stats(), time.monotonic() - started_s
        files = await self._threads.run(partial(self._files, profile, samples))
        summary = ProfileSummary(
            self._node_id,
            took_s,
            after.steps - before.steps,
            after.prefill_tokens - before.prefill_tokens,
            after.decode_tokens - before.decode_tokens,
            {name: total - before.part_seconds.get(name, 0.0) for name, total in after.part_seconds.items()},
            {name: len(data) for name, data in files.items()},
        )
        return summary, list(files.values())

    async def _wait(self, end_s: float) -> None:
        """Wait until then, or until the engine has recorded as much as it keeps."""
        while (left_s := end_s - time.monotonic()) > 0:
            if self._engine is not None and self._engine.is_full:
                return
            await asyncio.sleep(min(LOOK_S, left_s))

    async def _stats(self) -> EngineStats:
        return await asyncio.wrap_future(self._worker.stats())

    def _files(self, profile: EngineProfile, samples: StackSamples) -> dict[str, bytes]:
        """Return the files that are small enough to send. Runs on a thread."""
        files = {TRACE: chrome_trace(profile.steps, samples)}
        if profile.has_operations and self._engine is not None:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / OPERATIONS
                self._engine.write_operations(path)
                files[OPERATIONS] = path.read_bytes()
        for name, data in list(files.items()):
            if len(data) > MAX_FILE_BYTES:
                log.warning("profile.file_too_large", extra={"file": name, "bytes": len(data)})
                del files[name]
        return files
