"""One attack on a running stack: its effect on a neighbor and on the processes, and the attacker's answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hostile.attacks import Attack
from hostile.costs import MemoryWatch
from hostile.neighbor import Neighbor, p99
from hostile.stack import POOL, Stack

QUIET_S = 4.0
FIRST_EVENTS_S = 60.0
END_S = 30.0
"""An attacker's process has ended so long after its last answer."""

MAX_GAP_SHARE, MAX_GAP_S = 1.2, 0.05
"""The neighbor's p99 gap may grow by a fifth, or by so much."""
MAX_GROWTH = 200 << 20
MAX_HOLD_S = 0.05


@dataclass
class Verdict:
    """The measured effects of one attack. Times are in seconds, sizes in bytes."""

    attack: str
    quiet_p99_s: float = 0.0
    attacked_p99_s: float = 0.0
    afterwards_p99_s: float = 0.0
    """In the seconds after the attack."""
    longest_gap_s: float = 0.0
    longest_first_wait_s: float = 0.0
    growth: dict[str, int] = field(default_factory=dict)
    holds_s: dict[str, float] = field(default_factory=dict)
    """The longest hold of each process's loop while attacked."""
    holders: list[str] = field(default_factory=list)
    ended: dict[str, int] = field(default_factory=dict)
    troubles: list[str] = field(default_factory=list)
    """What the neighbor got instead of tokens."""
    answers: dict[str, int] = field(default_factory=dict)
    samples: dict[str, str] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def gap_grew(self) -> bool:
        """Whether the neighbor's p99 gap grew by more than a fifth and by more than 50 ms."""
        limit_s = max(MAX_GAP_SHARE * self.quiet_p99_s, self.quiet_p99_s + MAX_GAP_S)
        return max(self.attacked_p99_s, self.afterwards_p99_s) > limit_s

    def problems(self, attack: Attack) -> list[str]:
        """The effects that are not allowed, empty if there are none."""
        found = [f"{name} ended with status {status}" for name, status in self.ended.items()]
        found += [f"the neighbor got {trouble}" for trouble in self.troubles[:3]]
        if self.gap_grew and not attack.load:
            worst_s = max(self.attacked_p99_s, self.afterwards_p99_s)
            found.append(f"the neighbor's p99 gap went from {self.quiet_p99_s:.3f} to {worst_s:.3f} s")
        found += [f"{name} grew by {size >> 20} MiB" for name, size in self.growth.items() if size > MAX_GROWTH]
        found += [
            f"{name}'s loop was held for {held:.3f} s" for name, held in self.holds_s.items() if held > MAX_HOLD_S
        ]
        bad = [label for label in self.answers if is_bad(label) or (attack.refused and is_answer(label))]
        return found + [f"the attacker got {self.answers[label]} × {label}: {self.samples.get(label)}" for label in bad]

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for a JSON file."""
        return asdict(self)


def is_answer(label: str) -> bool:
    """Whether an attacker's request was accepted."""
    return label in ("200", "200 large", "200 stream")


def is_bad(label: str) -> bool:
    """Whether no caller may ever get this answer, however invalid the request."""
    return label.startswith("500") or any(word in label for word in ("without", "node_lost", "internal_error"))


@contextlib.asynccontextmanager
async def _beside(stack: Stack) -> AsyncIterator[tuple[Neighbor, MemoryWatch]]:
    """Run a neighbor and a memory watch while the block runs."""
    watch = MemoryWatch(stack.pids)
    async with stack.client("neighbor", timeout=None) as http:
        neighbor = Neighbor(http, POOL)
        tasks = [asyncio.create_task(neighbor.run()), asyncio.create_task(watch.run())]
        try:
            yield neighbor, watch
        finally:
            for task in tasks:
                task.cancel()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(result, Exception):
                    raise result


@dataclass
class _Windows:
    """Periods of the monotonic clock: the quiet ones before attacks, the attacks, and the seconds after them."""

    quiet: list[tuple[float, float]] = field(default_factory=list)
    attacked: list[tuple[float, float]] = field(default_factory=list)
    afterwards: list[tuple[float, float]] = field(default_factory=list)


async def carry_out(
    stack: Stack, attack: Attack, *, seconds: float | None = None, quiet_s: float = QUIET_S, rounds: int = 1
) -> Verdict:
    """Alternate quiet periods and attacks, with the neighbor's streams running throughout."""
    verdict, windows, answers = Verdict(attack.name), _Windows(), Counter[str]()
    seconds = seconds or attack.seconds
    async with _beside(stack) as (neighbor, watch):
        async with asyncio.timeout(FIRST_EVENTS_S):
            while neighbor.num_events < 50:
                await asyncio.sleep(0.05)
        for number in range(rounds):
            async with _attacker(stack, attack, seconds) as process:
                windows.quiet.append(await _sleep(quiet_s))
                if number == 0:
                    watch.start_anew()
                began_s = time.monotonic()
                got = await _attack(process, seconds + attack.grace_s + END_S, neighbor.last_event_id)
            windows.attacked.append((began_s, time.monotonic()))
            windows.afterwards.append(await _sleep(quiet_s))
            answers.update(got["answers"])
            verdict.samples.update(got["samples"])
            verdict.figures.update(got["figures"])
    verdict.answers, verdict.growth, verdict.ended = dict(answers), watch.growth(), stack.ended()
    _note_gaps(verdict, neighbor, windows)
    for window in windows.attacked:
        _note_holds(verdict, stack, window)
    return verdict


async def _sleep(seconds: float) -> tuple[float, float]:
    began_s = time.monotonic()
    await asyncio.sleep(seconds)
    return began_s, time.monotonic()


def _note_gaps(verdict: Verdict, neighbor: Neighbor, windows: _Windows) -> None:
    quiet, attacked, afterwards = (
        [gap for window in some for gap in neighbor.gaps(*window)]
        for some in (windows.quiet, windows.attacked, windows.afterwards)
    )
    expected_s = statistics.median(neighbor.gaps(*windows.quiet[0]))
    verdict.quiet_p99_s, verdict.attacked_p99_s = p99(quiet, expected_s), p99(attacked, expected_s)
    verdict.afterwards_p99_s = p99(afterwards, expected_s)
    verdict.longest_gap_s = max(attacked, default=0.0)
    verdict.longest_first_wait_s = max((wait for w in windows.attacked for wait in neighbor.waits(*w)), default=0.0)
    verdict.seconds = sum(until_s - since_s for since_s, until_s in windows.attacked)
    first_s, last_s = windows.quiet[0][0], windows.afterwards[-1][1]
    verdict.troubles = [what for at_s, what in neighbor.troubles if first_s <= at_s <= last_s]


def _note_holds(verdict: Verdict, stack: Stack, window: tuple[float, float]) -> None:
    holds = sorted(stack.holds(*window), key=lambda hold: -hold.held_s)
    for hold in holds:
        verdict.holds_s[hold.process] = max(verdict.holds_s.get(hold.process, 0.0), hold.held_s)
    verdict.holders += [f"{hold.process} {hold.held_s:.3f} s: {hold.frames}" for hold in holds[:5]]


@contextlib.asynccontextmanager
async def _attacker(stack: Stack, attack: Attack, seconds: float) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start the attacker's process. Return it ready to begin."""
    words = [attack.name, stack.url, stack.keys["attacker"], POOL, str(seconds)]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, "-m", "hostile.attacker", *words)
    process = await asyncio.create_subprocess_exec(*command, env=env, stdin=pipe, stdout=pipe)
    try:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"ready\n"
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _attack(process: asyncio.subprocess.Process, patience_s: float, foreign_place: str) -> dict[str, Any]:
    """Run the attack. Return the report that its process prints."""
    async with asyncio.timeout(patience_s):
        said, _ = await process.communicate(f"{foreign_place}\n".encode())
    assert process.returncode == 0, f"the attacker ended with {process.returncode}"
    answer: dict[str, Any] = json.loads(said)
    return answer
