"""A scheduler with a policy and a clock that the test sets."""

from __future__ import annotations

from typing import Any

import numpy as np
from fakes.schedules import BLOCK_SIZE, new_scheduler, new_sequence

from penstock.gpu_node.engine.policy.by_policy import ByPolicy, note_held
from penstock.gpu_node.engine.scheduler.scheduler import Scheduler
from penstock.gpu_node.engine.sequence import Sequence
from penstock.queue.policy import PolicyConfig, PolicyName

STEP_MS = 10.0
AGING_MS = 10**6


class Bench:
    """A scheduler with few blocks and a policy. The test calls each step; `starts` lists the started sequences."""

    def __init__(
        self, name: PolicyName, num_blocks: int = 12, *, bypass_ms: int = 0, aging_ms: int = AGING_MS, **settings: Any
    ) -> None:
        self.now_ms = 0.0
        self.order = ByPolicy(PolicyConfig(name, aging_ms, bypass_ms), lambda: self.now_ms)
        self.scheduler: Scheduler = new_scheduler(num_blocks, policy=self.order, budget=64, **settings)[0]
        self.starts: list[str] = []
        self.num_added = 0

    def add(self, name: str, num_prompt: int = 8, num_output: int = 8, **fields: Any) -> Sequence:
        return self.add_choices(1, name, num_prompt, num_output, **fields)[0]

    def add_choices(self, n: int, name: str, num_prompt: int, num_output: int, **fields: Any) -> list[Sequence]:
        self.num_added += 1
        first_token = 1000 * self.num_added
        seqs = [new_sequence(name, num_prompt, num_output, choice=i, first_token=first_token) for i in range(n)]
        for seq in seqs:
            for field, value in fields.items():
                setattr(seq, field, value)
            seq.urgency = seq.level
            self.order.added(seq)
        self.scheduler.add(*seqs)
        self.now_ms += 0.001
        return seqs

    def step(self) -> None:
        before = set(self.scheduler.running)
        step = self.scheduler.schedule()
        self.scheduler.check_integrity()
        if step is None:
            return
        self.starts += [seq.request_id for seq in self.scheduler.running if seq not in before]
        self.scheduler.plan(step)
        self.now_ms += STEP_MS
        note_held(step.seqs, STEP_MS, BLOCK_SIZE)
        self.scheduler.commit(step, np.full(len(step.sampled), 7, dtype=np.int32))
        for seq in step.sampled_seqs:
            if seq.row < 0:
                self.order.ended(seq, len(seq.token_ids) - seq.num_prompt_tokens)

    def run(self) -> str:
        while self.scheduler.running or self.scheduler.queues:
            self.step()
        return "".join(dict.fromkeys(self.starts))
