"""The harness detects the effects that it measures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hostile.attacker import label_of
from hostile.attacks import ATTACKS
from hostile.campaign import Verdict
from hostile.neighbor import StreamGaps, p99
from hostile.stack import PROBE

BLOCKS = """
import asyncio, time
{extra}
async def block_the_loop():
    for _ in range(4):
        await asyncio.sleep(0.05)
        time.sleep(0.15)
    await asyncio.sleep(0.05)
{run}
"""
LOOPS = {"asyncio": ("", "asyncio.run(block_the_loop())"), "uvloop": ("import uvloop", "uvloop.run(block_the_loop())")}


@pytest.mark.parametrize("loop", LOOPS)
def test_probe_finds_a_blocked_event_loop(tmp_path: Path, loop: str) -> None:
    extra, run = LOOPS[loop]
    (tmp_path / "blocks.py").write_text(BLOCKS.format(extra=extra, run=run))
    env = os.environ | {"LOOP_PROBE": str(tmp_path / "holds"), "PYTHONSAFEPATH": "1"}
    subprocess.run([sys.executable, PROBE, str(tmp_path / "blocks.py")], env=env, check=True)
    holds = [json.loads(line) for line in (tmp_path / "holds").read_text().splitlines()]
    found = [hold for hold in holds if hold["held_s"] > 0.05 and "block_the_loop" in hold["frames"]]
    assert len(found) >= 2, holds


def test_a_gap_that_is_open_counts_as_long_as_it_has_lasted() -> None:
    stream = StreamGaps()
    for second in (1.0, 2.0, 3.0):
        stream.note(second)
    assert stream.between(0.0, 3.5) == [1.0, 1.0, 0.5]
    assert stream.between(2.5, 10.0) == [1.0, 7.0]
    stream.note(9.0)
    assert stream.between(2.5, 8.0) == [1.0, 5.0], "it was open then"
    stream.stop()
    assert stream.between(8.5, 20.0) == [6.0], "no gap between two streams"


def test_wait_for_the_first_event_is_reported_while_it_lasts() -> None:
    stream = StreamGaps()
    stream.ask(1.0)
    assert stream.waits(0.0, 5.0) == [4.0]
    stream.note(6.0)
    assert stream.waits(0.0, 20.0) == [5.0]
    assert stream.waits(7.0, 20.0) == []


def test_one_long_gap_weighs_as_much_as_the_short_ones_it_replaced() -> None:
    assert p99([0.02] * 500, 0.02) == 0.02
    assert p99([0.02] * 500 + [10.0], 0.02) > 9


@pytest.mark.parametrize(
    ("verdict", "problem"),
    [
        (Verdict("choice", quiet_p99_s=0.02, attacked_p99_s=0.08), "p99 gap"),
        (Verdict("choice", quiet_p99_s=0.02, afterwards_p99_s=0.08), "p99 gap"),
        (Verdict("choice", growth={"node": 201 << 20}), "node grew by 201 MiB"),
        (Verdict("choice", holds_s={"gateway": 0.06}), "gateway's loop was held"),
        (Verdict("choice", ended={"node": 139}), "node ended with status 139"),
        (Verdict("choice", troubles=["429 busy"]), "the neighbor got 429"),
        (Verdict("choice", answers={"200": 1}), "the attacker got 1 × 200"),
        (Verdict("nothing", answers={"500 internal_error": 1}), "500 internal_error"),
    ],
)
def test_a_verdict_names_its_problem(verdict: Verdict, problem: str) -> None:
    (found,) = verdict.problems(ATTACKS[verdict.attack])
    assert problem in found


def test_a_verdict_without_problems_has_none() -> None:
    fine = Verdict("choice", quiet_p99_s=0.02, attacked_p99_s=0.06, growth={"node": 1 << 20}, holds_s={"node": 0.04})
    fine.answers = {"400 structured_outputs.choice": 40}
    assert fine.problems(ATTACKS["choice"]) == []


def test_answers_are_told_apart() -> None:
    error = {"error": {"message": "why", "type": "t", "param": "n", "code": "c"}}
    assert label_of(400, json.dumps(error).encode()) == ("400 n", "why")
    assert label_of(200, b"data: {}\n\ndata: " + json.dumps(error).encode() + b"\n\n") == (
        "200 stream failed: n",
        "why",
    )
    assert label_of(200, b"data: {}\n\ndata: [DONE]\n\n") == ("200 stream", "")
    assert label_of(502, b"oops") == ("502 without an error object", "oops")
