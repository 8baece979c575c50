"""A Chrome trace of a profile: the engine's steps with their parts, and the call stacks of all threads."""

from __future__ import annotations

import gzip
import json
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from penstock.gpu_node.engine.in_flight import RecordedStep
from penstock.gpu_node.monitor.stack_samples import StackSamples

STEPS_TRACK = 1
"""The id of the track of steps. Threads have addresses as ids, so no thread has this one."""
_LEVEL = 6


def chrome_trace(steps: Sequence[RecordedStep], samples: StackSamples) -> bytes:
    """Return a compressed Chrome trace, for https://ui.perfetto.dev or chrome://tracing."""
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
