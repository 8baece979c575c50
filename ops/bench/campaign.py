"""Run what a campaign still lacks: engines alternate within each repeat, each run in a process of its own."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO

from bench import peers, weights
from bench.child import EVENT, Spec
from bench.contestants import Contestant
from bench.journal import Journal, Run
from bench.machine import ForeignCpu, revision

OPS = Path(__file__).resolve().parents[1]
LOG = peers.BUILD / "bench" / "last-run.log"
RUN_TIMEOUT_S = 1200.0
LAST_WORDS = 300
NOT_INHERITED = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS")
"""Each engine waits at its barriers as it likes best, whatever we were started with."""


class Campaign:
    """Contestants × workloads × repeats; of each at most `max_tries` runs while they are dirty."""

    def __init__(
        self,
        journal: Journal,
        model: str,
        contestants: Iterable[Contestant],
        *,
        max_tries: int = 3,
        read_rate: Callable[[], float] | None = None,
    ) -> None:
        """read_rate: returns the GB/s that all cores read from memory now. If given, it is measured around each run."""
        self._read_rate = read_rate
        self._journal = journal
        self._max_tries = max_tries
        self._model = model
        self._contestants = list(contestants)
        self._revision = revision()

    def missing(self) -> dict[str, str]:
        """Return the contestants that cannot run here, each with the reason."""
        found = {}
        for one in self._contestants:
            if not one.is_installed:
                found[one.name] = f"{one.peer} is not installed (make bench-peers)"
            elif weights.path(one.weights, self._model) is None:
                found[one.name] = f"no {one.weights} weights (make bench-peers)"
        return found

    def run(self, workloads: Iterable[str], repeats: int) -> None:
        """All that is not in the journal yet; a dirty run is done again, a failed one only by the next campaign."""
        missing = self.missing()
        failed: set[tuple[str, str]] = set()
        wanted = [
            (repeat, workload, one)
            for repeat in range(repeats)
            for workload in workloads
            for one in self._contestants
            if workload in one.workloads and one.name not in missing
        ]
        for i, (repeat, workload, one) in enumerate(wanted):
            while self._needs(one.name, workload, repeat) and (one.name, workload) not in failed:
                run = self.run_once(one, workload, repeat)
                self._journal.add(run)
                _say(f"[{i + 1}/{len(wanted)}] {one.name}, {workload}, repeat {repeat + 1}: {summary(run)}")
                if run.error:
                    failed.add((one.name, workload))

    def _needs(self, contestant: str, workload: str, repeat: int) -> bool:
        tries = self._journal.tries(contestant, workload, repeat)
        return all(run.is_dirty for run in tries) and len(tries) < self._max_tries

    def run_once(self, one: Contestant, workload: str, repeat: int) -> Run:
        """Run it; the journal does not get it. A failure is in the run's `error`."""
        # Read first: a run's time counts from when its process is started.
        before = self._read_rate() if self._read_rate else 0.0
        place = weights.path(one.weights, self._model)
        spec = Spec(workload, str(place), one.options, one.max_requests, one.parts, time.monotonic())
        argv = [one.python, "-m", f"bench.engines.{one.module}", json.dumps(asdict(spec))]
        shown = anywhere(" ".join([*(f"{k}={v}" for k, v in one.env.items()), *map(shlex.quote, argv)]))
        try:
            result, foreign_cpu = _watch(argv, one.env)
        except RunError as error:
            return Run(one.name, workload, repeat, self._revision, shown, error=anywhere(str(error)))
        if self._read_rate:
            # Other virtual machines share the memory's bandwidth, so it changes from minute to minute.
            rate = max(before, self._read_rate())
            result |= {"read_gb_per_s": rate, "readable_mb_per_token": rate * result["itl_mean_ms"]}
        return Run(one.name, workload, repeat, self._revision, shown, result, round(foreign_cpu, 3))


class RunError(Exception):
    """A run gave no result. The message is its last output."""


def anywhere(text: str) -> str:
    """Text without what holds on this machine only: paths as seen from the repository's root."""
    return text.replace(f"{OPS.parent}/", "")


def summary(run: Run) -> str:
    """Return one line for the terminal."""
    if run.error:
        return f"FAILED: {run.error}"
    shown = ("tokens_per_s", "ttft_p50_ms", "itl_mean_ms", "ready_s", "rss_peak_mib")
    dirty = f", DIRTY ({run.foreign_cpu:.0%} of the CPU went to others)" if run.is_dirty else ""
    return ", ".join(f"{name} {run.result[name]:.1f}" for name in shown) + dirty


def _watch(argv: list[str], env: dict[str, str]) -> tuple[dict[str, float], float]:
    """Return the result that a child prints, and the share of the CPU that other processes used meanwhile."""
    inherited = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
    own = {"PYTHONPATH": str(OPS), "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}
    LOG.parent.mkdir(parents=True, exist_ok=True)
    with LOG.open("w") as log:
        child = subprocess.Popen(
            argv, env=inherited | own | env, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
        )
        timer = threading.Timer(RUN_TIMEOUT_S, _end, [child])
        timer.start()
        try:
            result, share = _listen(child, log)
        finally:
            timer.cancel()
            _end(child)
            child.wait()
    if not result:
        raise RunError(_log_tail(child.returncode))
    return result, share


def _listen(child: subprocess.Popen[str], log: IO[str]) -> tuple[dict[str, float], float]:
    result: dict[str, float] = {}
    share = 0.0
    foreign = ForeignCpu()
    for line in child.stdout or ():
        if not line.startswith(EVENT):
            log.write(line)
            continue
        said = json.loads(line.removeprefix(EVENT))
        if said["event"] == "begin":
            foreign = ForeignCpu()
        elif said["event"] == "end":
            share = foreign.share()
        else:
            result = said["result"]
    child.wait()
    return result, share


def _end(child: subprocess.Popen[str]) -> None:
    """Nothing that a run started may disturb the next."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def _log_tail(status: int) -> str:
    lines = [line for line in LOG.read_text(errors="replace").splitlines() if line.strip()]
    return f"status {status}: {' / '.join(lines[-3:])[-LAST_WORDS:]}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
