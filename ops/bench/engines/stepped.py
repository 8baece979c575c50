"""What engines that are stepped in this process have in common."""

from __future__ import annotations

from bench.drive import drive
from bench.stopwatch import Stopwatch
from bench.workload import BenchRequest, Workload


class SteppedSession:
    """A Session that is a Stepper as well. Subclasses implement adding requests and stepping."""

    in_own_process = True

    def run(self, workload: Workload, watch: Stopwatch) -> None:
        drive(self, workload, watch)

    def extra(self) -> dict[str, float]:
        return {}

    def add(self, i: int, request: BenchRequest) -> None:
        raise NotImplementedError

    def has_work(self) -> bool:
        raise NotImplementedError

    def step(self, saw) -> None:
        raise NotImplementedError
