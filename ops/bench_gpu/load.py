"""A synthetic load on the runner, with each step planned after the tokens of the one before it, or before."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from bench_gpu.models import BLOCK_SIZE, Model
from bench_gpu.steps import plan_of
from penstock.gpu_node.model.protocol import StepPlan


@dataclass(eq=False)
class Request:
    """A prompt and what is to come of it; the output is as long as asked for, so that plans need no tokens."""

    prompt: np.ndarray
    num_output: int
    blocks: np.ndarray | None = None
    num_computed: int = 0
    num_said: int = 0
    last: int = 0
    """The newest token, or -1 - i while row i of the step before has still to say it."""

    @property
    def num_blocks(self) -> int:
        return -(-(len(self.prompt) + self.num_output) // BLOCK_SIZE)

    def next_tokens(self, most: int) -> np.ndarray:
        if self.num_computed < len(self.prompt):
            return self.prompt[self.num_computed : self.num_computed + most]
        return np.array([self.last])


def make_requests(count: int, shortest: int, longest: int, seed: int = 0) -> list[Request]:
    """Prompts and outputs of random lengths, as nano-vllm's bench draws them."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(shortest, longest + 1, size=(count, 2))
    return [Request(rng.integers(1, 60, size=prompt), int(output)) for prompt, output in lengths]


class Driver:
    """First come, first served, in chunks under one budget; blocks for a request's whole length when it starts."""

    def __init__(self, model: Model, requests: list[Request], budget: int) -> None:
        self._model = model
        self._waiting = deque(requests)
        self._running: list[Request] = []
        self._free = list(range(1, model.sizes.num_device_blocks + 1))
        self._budget = budget

    def run(self, *, overlap: bool) -> tuple[int, int]:
        """All of it; tokens said, and steps."""
        ahead, num_steps, num_said = None, 0, 0
        while (planned := self._plan()) is not None:
            plan, sampled = planned
            handle = self._model.runner.submit(plan)
            num_steps += 1
            num_said += len(sampled)
            if overlap:
                if ahead is not None:
                    ahead.result()
                ahead = handle
            else:
                for request, token in zip(sampled, handle.result().tokens.tolist(), strict=True):
                    request.last = token
        if ahead is not None:
            ahead.result()
        return num_said, num_steps

    def _plan(self) -> tuple[StepPlan, list[Request]] | None:
        self._retire()
        self._admit()
        budget, ids, served = self._budget, [], []
        # Decode steps first: they are one token each.
        for request in sorted(self._running, key=lambda one: one.num_computed < len(one.prompt)):
            tokens = request.next_tokens(budget)
            if len(tokens) and budget:
                budget -= len(tokens)
                ids.append(tokens)
                served.append(request)
        if not served:
            return None
        starts = np.array([request.num_computed for request in served])
        tables = np.zeros((len(served), max(request.num_blocks for request in served)), np.int32)
        for row, request, tokens in zip(tables, served, ids, strict=True):
            row[: request.num_blocks] = request.blocks
            request.num_computed += len(tokens)
        rows = [i for i, request in enumerate(served) if request.num_computed >= len(request.prompt)]
        sampled = [served[i] for i in rows]
        plan = plan_of(ids, starts, tables, np.array(rows, np.int64))
        for i, request in enumerate(sampled):
            request.num_said += 1
            request.last = -1 - i
        return plan, sampled

    def _retire(self) -> None:
        for request in [one for one in self._running if one.num_said == one.num_output]:
            self._running.remove(request)
            self._free += request.blocks.tolist()

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._model.max_num_seqs:
            if self._waiting[0].num_blocks > len(self._free):
                return
            request = self._waiting.popleft()
            request.blocks = np.array([self._free.pop() for _ in range(request.num_blocks)], np.int32)
            self._running.append(request)
