"""The ways transformers has to generate. Options: `way` (one_by_one, static, continuous) and `batch` for static."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from bench.child import Spec, main
from bench.drive import Saw
from bench.engines.stepped import SteppedSession
from bench.workload import BenchRequest

PAD = 0


def _load(weights: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.bfloat16)
    # So that nothing but the number of tokens ends a request.
    model.generation_config.eos_token_id = None
    return model


class _Heard:
    """A streamer for batches of any size; the prompt is put first."""

    def __init__(self, hear: Callable[[], None]) -> None:
        self._hear = hear
        self._is_prompt = True

    def put(self, _: Any) -> None:
        if not self._is_prompt:
            self._hear()
        self._is_prompt = False

    def end(self) -> None:
        pass


class _Static(SteppedSession):
    """`generate` over batches that are padded to their longest prompt and run to their longest output."""

    def __init__(self, spec: Spec) -> None:
        self._model = _load(spec.weights)
        self._batch = spec.options.get("batch", 1)
        self._waiting: deque[tuple[int, BenchRequest]] = deque()

    def add(self, i: int, request: BenchRequest) -> None:
        self._waiting.append((i, request))

    def has_work(self) -> bool:
        return bool(self._waiting)

    def step(self, saw: Saw) -> None:
        import torch

        batch = [self._waiting.popleft() for _ in range(min(self._batch, len(self._waiting)))]
        width = max(len(request.prompt) for _, request in batch)
        ids = torch.tensor([[PAD] * (width - len(r.prompt)) + r.prompt for _, r in batch])
        mask = torch.tensor([[0] * (width - len(r.prompt)) + [1] * len(r.prompt) for _, r in batch])
        num_steps = 0

        def hear() -> None:
            nonlocal num_steps
            num_steps += 1
            for i, request in batch:
                if num_steps <= request.num_output:
                    saw(i, 1)

        most = max(request.num_output for _, request in batch)
        streamer = _Heard(hear)
        self._model.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=most, pad_token_id=PAD, streamer=streamer
        )


class _Continuous(SteppedSession):
    """Its continuous batching, whose loop has a thread of its own."""

    def __init__(self, spec: Spec) -> None:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=PAD)
        self._manager = _load(spec.weights).init_continuous_batching(
            config, continuous_batching_config=ContinuousBatchingConfig(**spec.options.get("config", {}))
        )
        self._manager.start()
        self._counts: dict[str, int] = {}
        self._open: dict[str, int] = {}
        self._num_requests = 0

    def add(self, i: int, request: BenchRequest) -> None:
        self._num_requests += 1
        name = f"{self._num_requests}"
        self._open[name], self._counts[name] = i, 0
        self._manager.add_request(request.prompt, name, max_new_tokens=request.num_output, streaming=True)

    def has_work(self) -> bool:
        return bool(self._open)

    def step(self, saw: Saw) -> None:
        output = self._manager.get_result(timeout=0.05)
        if output is None:
            if not self._manager.is_running():
                raise RuntimeError("the continuous batching of transformers ended")
            return
        name = output.request_id
        gained = len(output.generated_tokens) - self._counts[name]
        if gained:
            self._counts[name] += gained
            saw(self._open[name], gained)
        if output.is_finished():
            del self._open[name]

    def close(self) -> None:
        self._manager.stop(block=True)


@contextmanager
def open_session(spec: Spec) -> Iterator[SteppedSession]:
    if spec.options["way"] != "continuous":
        yield _Static(spec)
        return
    session = _Continuous(spec)
    try:
        yield session
    finally:
        session.close()


if __name__ == "__main__":
    main(open_session)
