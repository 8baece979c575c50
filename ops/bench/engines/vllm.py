"""vLLM in process, stepped as `LLM.generate` steps it. Options are arguments of LLM."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from bench.child import Spec, main
from bench.drive import Saw
from bench.engines.stepped import SteppedSession
from bench.workload import BenchRequest


class _Vllm(SteppedSession):
    def __init__(self, spec: Spec) -> None:
        from vllm import LLM, SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._params = lambda request: SamplingParams(
            temperature=0, max_tokens=request.num_output, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )
        self._engine = LLM(spec.weights, **spec.options).llm_engine

    def add(self, i: int, request: BenchRequest) -> None:
        self._engine.add_request(str(i), {"prompt_token_ids": request.prompt}, self._params(request))

    def has_work(self) -> bool:
        return self._engine.has_unfinished_requests()

    def step(self, saw: Saw) -> None:
        for output in self._engine.step():
            if output.outputs[0].token_ids:
                saw(int(output.request_id), len(output.outputs[0].token_ids))


@contextmanager
def open_session(spec: Spec) -> Iterator[_Vllm]:
    yield _Vllm(spec)


if __name__ == "__main__":
    main(open_session)
