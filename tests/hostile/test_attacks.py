"""The catalogue of attacks at the gateway, each beside a neighbor that must not notice; and bodies of the fuzzer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from hostile.attacks import ATTACKS
from hostile.campaign import carry_out
from hostile.fuzz import Fuzzer
from hostile.stack import Stack, running_stack

from penstock.cli.demo_model import demo_model
from tests.hostile.test_fuzz import SEED, check, tiny_stack

QUICK = ("forged_places", "odd_heads")
"""They need no time of their own, and nothing of a model."""
NUM_BODIES = 60
"""test_fuzz.py sends thousands in `make check-full`."""


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """A stack whose neighbor reads 50 tokens a second in each stream."""
    with running_stack(model=None, step_s=0.02) as stack:
        yield stack


@pytest.mark.parametrize("name", QUICK)
def test_attack_is_refused_and_the_neighbor_keeps_its_stream(
    stack: Stack, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other tests share the machine, so this one judges what happened, not how long it took."""
    monkeypatch.setenv("HOSTILE_ATTACKER_NICE", "0")
    verdict = asyncio.run(carry_out(stack, ATTACKS[name], seconds=0.4, quiet_s=0.2))
    assert verdict.answers
    timed = ("p99", "loop")
    assert [problem for problem in verdict.problems(ATTACKS[name]) if not any(word in problem for word in timed)] == []


def test_bodies_get_documented_answers(tmp_path: Path) -> None:
    """Other tests share the machine, so a hold that counts here is a gross one.

    An answer may fill the context, so that it is short: case 31 of the fuzzer asks for a million tokens.
    """
    with tiny_stack(tmp_path, dtype="bfloat16", runner="native", max_model_len=512) as stack:
        check(asyncio.run(Fuzzer(stack, SEED).run(NUM_BODIES)), NUM_BODIES, max_hold_s=1.0)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("name", ATTACKS)
def test_attack_does_not_hurt_the_neighbor(name: str) -> None:
    attack = ATTACKS[name]
    with running_stack(model=demo_model(), **attack.stack) as stack:
        verdict = asyncio.run(carry_out(stack, attack))
    assert verdict.problems(attack) == [], verdict
