"""One engine, one workload, one process: what every module of `bench.engines` runs as its main.

Its only argument is a Spec in JSON. It prints events as lines on stdout that start with EVENT: `begin` and `end` around
the measured part, `result` with the measurements. Everything else that an engine prints is its log. It runs in a peer's
environment too, so only the standard library may be imported here.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from bench import memory
from bench.stopwatch import Stopwatch
from bench.workload import WARM_UP, WORKLOADS, Workload

EVENT = "bench: "
EXIT_ABSENT = 3


@dataclass(frozen=True)
class Spec:
    """The parameters of one run."""

    workload: str
    weights: str
    options: dict[str, Any] = field(default_factory=dict)
    max_requests: int | None = None
    """Of a workload's requests only the first few: for engines that would need minutes for all."""
    parts: Sequence[str] | None = None
    """Which parts of the workload are run; None: all."""
    spawned_s: float = 0.0
    """On the machine's monotonic clock, when this process was started."""

    def requests_of(self) -> Workload:
        """The workload, cut to `max_requests` and to the chosen parts."""
        workload = WORKLOADS[self.workload]()
        names = workload.parts if self.parts is None else self.parts
        parts = {name: workload.parts[name] for name in names}
        return replace(workload, requests=workload.requests[: self.max_requests], parts=parts)


class Session(Protocol):
    """A loaded engine."""

    in_own_process: bool
    """Whether the engine lives in this process, whose memory then counts."""

    def run(self, workload: Workload, watch: Stopwatch) -> None:
        """Answer a workload."""

    def extra(self) -> dict[str, float]:
        """What else the engine knows about its run."""


Open = Callable[[Spec], AbstractContextManager[Session]]


def main(open_session: Open) -> None:
    """Load, warm up, measure, print the result. A missing package is reported by name."""
    spec = Spec(**json.loads(sys.argv[1]))
    try:
        with open_session(spec) as session:
            _emit("result", result=measure(session, spec))
    except ModuleNotFoundError as error:
        print(f"{error.name} is not installed in this environment: make bench-peers", file=sys.stderr)
        sys.exit(EXIT_ABSENT)


def measure(session: Session, spec: Spec) -> dict[str, float]:
    """Return the measurements of one run."""
    ready_s = time.monotonic() - spec.spawned_s
    workload = spec.requests_of()
    if workload.warm:
        session.run(WARM_UP, Stopwatch(WARM_UP))
    found = {"ready_s": ready_s, "rss_load_mib": memory.resident_mib(with_own=session.in_own_process)}

    def look(num_finished: int) -> None:
        if num_finished in workload.rss_after:
            found[f"rss_{num_finished}_mib"] = memory.resident_mib(with_own=session.in_own_process)

    _emit("begin")
    watch = Stopwatch(workload, on_finished=look)
    session.run(workload, watch)
    for name, part in workload.parts.items():
        watch_of_part = Stopwatch(part)
        session.run(part, watch_of_part)
        found |= {f"{name}_{metric}": value for metric, value in watch_of_part.measured().items()}
    _emit("end")
    found["first_token_s"] = watch.first_arrival_s - spec.spawned_s
    found["rss_peak_mib"] = memory.peak_mib(with_own=session.in_own_process)
    return found | watch.measured() | session.extra()


def _emit(event: str, **said: object) -> None:
    print(EVENT + json.dumps({"event": event} | said), flush=True)


def free_port() -> int:
    """Return a port of this machine that nothing listens on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])
