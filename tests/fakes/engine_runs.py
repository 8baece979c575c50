"""Helpers that run an engine and read its outputs."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from penstock.gpu_node.engine import Engine, StepOutput
from penstock.gpu_node.model.native.runner import NativeRunner
from penstock.gpu_node.model.protocol import StepHandle, StepPlan

TORCH: dict[str, Any] = {"runner": "torch", "dtype": "float32"}
"""Settings of an engine whose logits are compared with transformers', or changed on their way."""


def drain(engine: Engine) -> list[StepOutput]:
    """Step the engine until it has no work. Return its outputs."""
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    return outputs


def tokens_of(outputs: list[StepOutput], request_id: str, choice: int = 0) -> list[int]:
    """Return the tokens of one choice."""
    return [
        token_id
        for output in outputs
        if (output.request_id, output.choice) == (request_id, choice)
        for token_id in output.token_ids
    ]


def check_idle(engine: Engine) -> None:
    """Assert that an engine without requests holds no sequences and no blocks."""
    engine.check_integrity()
    stats = engine.stats()
    assert stats.kv_blocks_free == stats.kv_blocks_total
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    scheduler = engine._scheduler
    assert not scheduler._table.guides and not vars(scheduler.drafts)["_drafters"]


def kill_a_rank_at(token_id: int, runner: NativeRunner, patched: pytest.MonkeyPatch) -> None:
    """Kill a rank whenever the start of a prompt with this token is submitted."""
    submit = runner.submit

    def killing(plan: StepPlan) -> StepHandle:
        if (plan.token_ids == token_id).any() and (plan.positions == 0).any():
            os.kill(runner.rank_pids[0], signal.SIGKILL)
        return submit(plan)

    patched.setattr(runner, "submit", killing)
