"""A GPU that takes no time of the host: the real engine and GPU runner around steps that only take time.

A replay of a graph is a wait of `step_s` that samples tokens of a text. What CUDA's driver takes to enqueue a graph,
three copies and four events is not included.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from bench_gpu.models import Options, make_model

from penstock.gpu_node.engine import Engine, EngineConfig
from penstock.gpu_node.model.checkpoint.description import Description
from penstock.gpu_node.model.gpu.device import Device
from penstock.gpu_node.model.gpu.runner import GpuRunner
from penstock.gpu_node.model.loading import load
from penstock.gpu_node.model.options import RunnerOptions

CONTEXT = 1024
_TEXT = (
    "A penstock is the gated pipe that feeds a turbine. Requests wait in a reservoir. The gate opens by pressure. "
    "That is the number of free blocks of the KV cache. So the turbine neither starves nor floods. "
)


class WaitingGpu(Device):
    """Keeps the order and the length of steps, and computes nothing."""

    def __init__(self, step_s: float) -> None:
        super().__init__(torch.device("cpu"))
        self._step_s = step_s
        self._idle_at_s = time.perf_counter()
        self.num_steps = 0
        self.num_waited = 0
        """Steps that began later than the one before them ended: the GPU waited for the host."""
        self.idle_us = 0.0
        """How long it waited in all."""
        self.sampled: torch.Tensor | None = None
        """What the runner takes for the tokens of the last step."""
        self.text = torch.zeros(1, dtype=torch.int32)
        """Tokens, repeated; step k samples row i's token from position k + i."""

    def record_event(self) -> Any:
        return _Moment(max(self._idle_at_s, time.perf_counter()))

    def capture(self, work: Callable[[], None], pool: Any) -> tuple[Callable[[], None], Any]:
        del work
        return self.replay, pool

    def replay(self) -> None:
        now_s = time.perf_counter()
        if (idle_us := (now_s - self._idle_at_s) * 1e6) > 0:
            self.idle_us += idle_us
            self.num_waited += 1
        self._idle_at_s = max(self._idle_at_s, now_s) + self._step_s
        if self.sampled is not None:
            at = self.num_steps % (len(self.text) - len(self.sampled))
            self.sampled.copy_(self.text[at : at + len(self.sampled)])
        self.num_steps += 1


class _Moment:
    """An event that a step of known length reaches."""

    def __init__(self, at_s: float) -> None:
        self._at_s = at_s

    def wait(self) -> None:
        if (left_s := self._at_s - time.perf_counter()) > 0:
            time.sleep(left_s)

    def hold(self) -> None:
        """Streams have no length of their own."""

    def ms_since(self, earlier: Any) -> float:
        return 1e3 * (self._at_s - float(earlier._at_s))


def make_engine(model: str, step_s: float, max_num_seqs: int) -> tuple[Engine, WaitingGpu]:
    """Return an engine with the tokenizer and the vocabulary of a model, and its GPU."""
    gpu = WaitingGpu(step_s)
    settings: dict[str, Any] = {
        "max_num_seqs": max_num_seqs,
        "max_model_len": 2 * CONTEXT,
        "max_num_batched_tokens": 2048,
    }
    with _loading(gpu, max_num_seqs):
        engine = Engine(EngineConfig(model=model, block_size=16, **settings))
    ids = engine.tokenizer.encode(_TEXT)
    gpu.text = torch.tensor(ids * (4 * max_num_seqs // len(ids) + 2), dtype=torch.int32)
    return engine, gpu


@contextmanager
def _loading(gpu: WaitingGpu, max_num_seqs: int) -> Iterator[None]:
    """Let engines load a runner for `gpu`, of one layer with random weights: the host's work depends on neither."""

    def load_waiting(described: Description, _options: RunnerOptions, *_rest: Any) -> tuple[GpuRunner, str]:
        spec = replace(described.spec, layers=described.spec.layers[:1])
        options = Options(
            max_num_seqs=max_num_seqs, max_model_len=2 * CONTEXT, num_blocks=2 * max_num_seqs * CONTEXT // 16
        )
        runner = make_model("waiting", spec, gpu, options).runner
        gpu.sampled = runner._tokens
        no_logits = torch.zeros(max_num_seqs, 1)

        def wait_eagerly(*_step: Any) -> tuple[torch.Tensor, None]:
            gpu.replay()
            return no_logits, None

        runner._run_eagerly = wait_eagerly  # type: ignore[method-assign, assignment]
        return runner, "waiting"

    with patch.object(load, "_load", load_waiting):
        yield
