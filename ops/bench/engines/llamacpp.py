"""llama.cpp through llama-cpp-python, one stream at a time. Options are arguments of Llama."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from bench.child import Spec, main
from bench.drive import Saw
from bench.engines.stepped import SteppedSession
from bench.workload import BenchRequest


class _LlamaCpp(SteppedSession):
    def __init__(self, spec: Spec) -> None:
        from llama_cpp import Llama

        self._llama = Llama(spec.weights, verbose=False, **spec.options)
        self._waiting: deque[tuple[int, BenchRequest]] = deque()

    def add(self, i: int, request: BenchRequest) -> None:
        self._waiting.append((i, request))

    def has_work(self) -> bool:
        return bool(self._waiting)

    def step(self, saw: Saw) -> None:
        i, request = self._waiting.popleft()
        tokens = self._llama.generate(request.prompt, temp=0.0, repeat_penalty=1.0)
        for _ in range(request.num_output):
            next(tokens)
            saw(i, 1)
        tokens.close()


@contextmanager
def open_session(spec: Spec) -> Iterator[_LlamaCpp]:
    yield _LlamaCpp(spec)


if __name__ == "__main__":
    main(open_session)
