"""OpenVINO GenAI's continuous batching, in process. Options are fields of SchedulerConfig."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from bench.child import Spec, main
from bench.drive import Saw
from bench.engines.stepped import SteppedSession
from bench.workload import BenchRequest


class _OpenVino(SteppedSession):
    def __init__(self, spec: Spec) -> None:
        import numpy
        import openvino
        import openvino_genai as genai

        scheduler = genai.SchedulerConfig()
        for name, value in spec.options.items():
            setattr(scheduler, name, value)
        self._pipeline = genai.ContinuousBatchingPipeline(spec.weights, scheduler, "CPU")
        self._tensor = lambda prompt: openvino.Tensor(numpy.array([prompt], numpy.int64))
        self._config = lambda request: genai.GenerationConfig(
            max_new_tokens=request.num_output, ignore_eos=True, do_sample=False, apply_chat_template=False
        )
        self._handles = {}
        self._num_requests = 0

    def add(self, i: int, request: BenchRequest) -> None:
        # The warm-up's numbers come again.
        self._num_requests += 1
        tensor, config = self._tensor(request.prompt), self._config(request)
        self._handles[i] = self._pipeline.add_request(self._num_requests, tensor, config)

    def has_work(self) -> bool:
        return bool(self._handles)

    def step(self, saw: Saw) -> None:
        from openvino_genai import GenerationStatus

        self._pipeline.step()
        for i, handle in list(self._handles.items()):
            while handle.can_read():
                for output in handle.read().values():
                    saw(i, len(output.generated_ids))
            if handle.get_status() != GenerationStatus.RUNNING and not handle.can_read():
                del self._handles[i]


@contextmanager
def open_session(spec: Spec) -> Iterator[_OpenVino]:
    yield _OpenVino(spec)


if __name__ == "__main__":
    main(open_session)
