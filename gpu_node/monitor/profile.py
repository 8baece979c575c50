"""The node's side of `penstock profile`: it records for some seconds and sends what it recorded."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from penstock.contract.errors import PenstockError
from penstock.gpu_node.engine.records import EngineStats
from penstock.gpu_node.engine.timings import EngineProfile, EngineProfiler, ProfiledEngine, RecordedStep
from penstock.gpu_node.engine.worker import EngineLike, EngineWorker
from penstock.queue.broker.profiles import (
    MAX_FILE_BYTES,
    MAX_PROFILE_S,
    OPERATIONS,
    TRACE,
    ProfileBroker,
    ProfileRequest,
    ProfileSummary,
)
from penstock.runtime.event_loop import Threads

log = logging.getLogger(__package__)


STEPS_TRACK = 1
"""The id of the track of steps. Threads have addresses as ids, so no thread has this one."""
_LEVEL = 6


def chrome_trace(steps: Sequence[RecordedStep], samples: StackSamples) -> bytes:
    """Return the steps with their parts, and the call stacks of all threads, as a compressed Chrome trace.

    https://ui.perfetto.dev and chrome://tracing show it.
    """
    process = os.getpid()
    names = {STEPS_TRACK: "engine steps"} | {one.ident or 0: one.name for one in threading.enumerate()}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "tid": track, "args": {"name": name}} for track, name in names.items()
    ]
    for step in steps:
        events += _events_of(step)
    events += samples.events
    for event in events:
        event["pid"] = process
    return gzip.compress(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}).encode(), _LEVEL)


def _events_of(step: RecordedStep) -> Iterator[dict[str, Any]]:
    """Yield a step's event, and nested in it the events of the runner's parts in order."""
    start_us = step.ended_s * 1e6 - step.step_ms * 1e3
    facts = {
        "sequences": step.num_sequences,
        "prefill_tokens": step.num_prefill_tokens,
        "tokens": step.num_tokens,
        "schedule_ms": step.schedule_ms,
        "prepare_ms": step.prepare_ms,
        "output_ms": step.output_ms,
    }
    yield _event("step", start_us, step.step_ms) | {"args": facts}
    for name, part_ms in (("copies", step.copies_ms), ("forward", step.forward_ms), ("sample", step.sample_ms)):
        if part_ms:
            yield _event(name, start_us, part_ms)
            start_us += part_ms * 1e3


def _event(name: str, start_us: float, duration_ms: float) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": "engine", "tid": STEPS_TRACK, "ts": start_us, "dur": duration_ms * 1e3}


INTERVAL_S = 0.005
MAX_EVENTS = 200_000
MAX_DEPTH = 48
"""Frames of a thread that are kept, the innermost ones."""

Frame = tuple[str, str, int]
"""Function, file, and the line where the function begins."""


@dataclass(slots=True)
class _Open:
    frame: Frame
    started_s: float


@dataclass(slots=True)
class StackSamples:
    """The samples of a profile. Consecutive samples of a call are one event. Times are of `time.perf_counter`."""

    events: list[dict[str, Any]] = field(default_factory=list)
    _open: dict[int, list[_Open]] = field(default_factory=dict)

    def take(self, now_s: float, *, without: int) -> None:
        """Take one sample of all threads but one."""
        frames = sys._current_frames()
        for thread_id in self._open.keys() | frames.keys():
            if thread_id != without:
                self._note(thread_id, _stack(frames.get(thread_id)), now_s)

    def close(self, now_s: float) -> None:
        """End all calls that are open."""
        for thread_id in list(self._open):
            self._note(thread_id, [], now_s)

    def _note(self, thread_id: int, stack: list[Frame], now_s: float) -> None:
        was = self._open.setdefault(thread_id, [])
        num_same = 0
        while num_same < min(len(was), len(stack)) and was[num_same].frame == stack[num_same]:
            num_same += 1
        for one in reversed(was[num_same:]):
            if len(self.events) < MAX_EVENTS:
                name, file, line = one.frame
                times = {"ts": one.started_s * 1e6, "dur": (now_s - one.started_s) * 1e6}
                call = {"ph": "X", "name": name, "cat": "python", "tid": thread_id, "args": {"at": f"{file}:{line}"}}
                self.events.append(call | times)
        was[num_same:] = [_Open(frame, now_s) for frame in stack[num_same:]]


def record_stacks(stopped: threading.Event) -> StackSamples:
    """Sample all other threads until the event. Run it on a thread of its own."""
    samples, own = StackSamples(), threading.get_ident()
    while not stopped.wait(INTERVAL_S):
        samples.take(time.perf_counter(), without=own)
    samples.close(time.perf_counter())
    return samples


def _stack(frame: FrameType | None) -> list[Frame]:
    """Return the frames of a thread, the outermost of those that are kept first."""
    stack: list[Frame] = []
    while frame is not None and len(stack) < MAX_DEPTH:
        code = frame.f_code
        stack.append((code.co_qualname, code.co_filename, code.co_firstlineno))
        frame = frame.f_back
    return stack[::-1]


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
                log.warning("profile.failed", extra={"reason": error.reason})

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
