"""Generated bodies: each gets a documented answer, and every accepted job ends once.

Every run sends a few of them to a tiny model (test_attacks.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fixtures.tiny_model import make_tiny_model
from hostile.bodies import case_of
from hostile.fields import LIMITS
from hostile.fuzz import Fuzzed, Fuzzer
from hostile.stack import POOL, Stack, running_stack

from penstock.cli.demo_model import demo_model

SEED = 16
NUM_TINY, NUM_REAL = 15_000, 5_000
"""`make check-full` sends so many to a tiny model, which takes no time of its own, and to the demo model."""
MAX_HOLD_S = 0.05
MAX_GROWTH = 200 << 20


TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<tool_call>
{"name": "the function", "arguments": {}}
</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or "" }}
{%- for call in message.tool_calls or () %}<tool_call>
{{ call.function | tojson }}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}<|im_start|>assistant
"""
"""It takes tools, so that their schemas are compiled too."""


@contextmanager
def tiny_stack(folder: Path, **settings: Any) -> Iterator[Stack]:
    """The real engine around a model of two layers."""
    model = make_tiny_model(folder / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    usual: dict[str, Any] = {"dtype": "float32", "runner": "torch", "num_kv_blocks": 2048}
    with running_stack(model=model, **usual | settings) as stack:
        yield stack


def check(found: Fuzzed, count: int, *, max_hold_s: float) -> None:
    """Assert that no answer is bad. A failure prints the longest holds and their causes."""
    assert found.num_bodies == count
    assert found.complaints[:20] == []
    assert [hold for hold in found.holds if hold.held_s > max_hold_s] == []
    assert {name: size >> 20 for name, size in found.growth.items() if size > MAX_GROWTH} == {}
    assert found.num_jobs > count // 20, "some were accepted"


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_thousands_of_bodies_block_no_event_loop(tmp_path: Path) -> None:
    with tiny_stack(tmp_path) as stack:
        check(asyncio.run(Fuzzer(stack, SEED).run(NUM_TINY)), NUM_TINY, max_hold_s=MAX_HOLD_S)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(1500)
def test_thousands_of_bodies_block_no_event_loop_of_a_real_model() -> None:
    with running_stack(model=demo_model()) as stack:
        found = asyncio.run(Fuzzer(stack, SEED).run(NUM_REAL, first=NUM_TINY))
    check(found, NUM_REAL, max_hold_s=MAX_HOLD_S)


def test_a_number_gives_the_same_body_every_time() -> None:
    assert [case_of(SEED, number, POOL) for number in range(200)] == [
        case_of(SEED, number, POOL) for number in range(200)
    ]
    assert case_of(SEED, 1, POOL) != case_of(SEED + 1, 1, POOL)


def test_every_limit_is_tried_from_both_sides() -> None:
    cases = [case_of(SEED, number, POOL) for number in range(6000)]
    above, below = sum(case.must_refuse for case in cases), sum(not case.must_refuse for case in cases)
    assert above > 5 * len(LIMITS) and below > above
