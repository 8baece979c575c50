"""What tests do with an engine's outputs."""

from __future__ import annotations

from typing import Any

from penstock.gpu_node.engine import Engine, StepOutput

TORCH: dict[str, Any] = {"runner": "torch", "dtype": "float32"}
"""Settings of an engine whose logits are compared with transformers', or changed on their way."""


def drain(engine: Engine) -> list[StepOutput]:
    """Steps until nothing is left."""
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    return outputs


def tokens_of(outputs: list[StepOutput], request_id: str, choice: int = 0) -> list[int]:
    """One choice's tokens."""
    return [
        token_id
        for output in outputs
        if (output.request_id, output.choice) == (request_id, choice)
        for token_id in output.token_ids
    ]


def check_idle(engine: Engine) -> None:
    """Asserts that an engine without requests holds nothing."""
    engine.check_integrity()
    stats = engine.stats()
    assert stats.kv_blocks_free == stats.kv_blocks_total
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    scheduler = engine._scheduler
    assert not scheduler._table.guides and not scheduler.drafts._drafters
