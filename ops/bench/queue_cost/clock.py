"""A substitute for the engine: every sequence gains one token a step, and a step takes a configured time."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from penstock.contract.output import Usage
from penstock.contract.tool_formats import NO_CALLS
from penstock.gpu_node.engine.records import EngineRequest, EngineStats, StepOutput
from penstock.gpu_node.model.protocol import NO_RANKS, RankStats

POOL = "clock"
STAMP = 1
"""A prompt that starts with this token is answered with times (time.monotonic_ns) as text."""
SPOKEN = 2
WORD = " word"


class ClockTokenizer:
    """Enough of a tokenizer for prompts of token ids."""

    max_token_bytes = 8
    tool_format = NO_CALLS
    reasoning_parser = "none"
    thinking_switches: tuple[str, ...] = ()
    takes_effort = False

    def reasoning_rule(self, template_kwargs: str | None) -> None:
        return None

    def encode(self, text: str, *, framed: bool = True) -> list[int]:
        return [SPOKEN] * max(1, len(text) // 4)

    def encode_prompt(self, text: str, owner: object) -> list[int]:
        return self.encode(text)

    def encode_chat(
        self,
        messages: Sequence[dict[str, Any]],
        tools: str | None = None,
        template_kwargs: str | None = None,
        *,
        framed: bool = False,
        now: datetime | None = None,
        owner: object = None,
        max_tokens: int | None = None,
    ) -> list[int]:
        return self.encode(messages[-1]["content"])


@dataclass(slots=True)
class _Live:
    request_id: str
    prompt: Sequence[int]
    max_tokens: int
    added_ns: int
    num_said: int = 0


class ClockEngine:
    """Steps of `step_s`: slept, or worked on `num_busy` threads that hold no interpreter lock."""

    def __init__(self, step_s: float, num_busy: int = 0) -> None:
        self.tokenizer, self.texts, self.pairs = ClockTokenizer(), None, None
        self.max_model_len = 1 << 16
        self.num_kv_tokens, self.window_tokens = 1 << 24, None
        self.revision = "clock"
        self.leaves_core_free = num_busy < len(os.sched_getaffinity(0))
        self.background_due = False
        self.sampling_defaults: dict[str, int | float] = {}
        self._step_s = step_s
        self._num_busy = num_busy
        self._rounds = _rounds_of(step_s) if num_busy else 0
        self._helpers = ThreadPoolExecutor(max(1, num_busy - 1))
        self._live: dict[str, _Live] = {}
        self._num_steps = self._num_tokens = 0

    def capabilities(self) -> tuple[str, ...]:
        return ()

    def note_queued_background(self, is_queued: bool) -> None:
        pass

    def add(self, request: EngineRequest) -> None:
        max_tokens = request.params.max_tokens or 16
        self._live[request.request_id] = _Live(
            request.request_id, request.prompt_token_ids, max_tokens, time.monotonic_ns()
        )

    def adapters(self) -> dict[str, str]:
        return {}

    def abort(self, request_id: str) -> None:
        self._live.pop(request_id, None)

    def has_work(self) -> bool:
        return bool(self._live)

    def bind_thread(self) -> None:
        """Any core will do."""

    def wait(self) -> None:
        pass

    def requests_in_flight(self) -> set[str]:
        """It never hangs."""
        return set()

    @property
    def ranks(self) -> RankStats:
        return NO_RANKS

    def num_preemptions(self, request_id: str) -> int:
        return 0

    def memory_trail(self) -> list[str]:
        return []

    def step(self) -> list[StepOutput]:
        if self._num_busy:
            others = [self._helpers.submit(_work, self._rounds) for _ in range(self._num_busy - 1)]
            _work(self._rounds)
            for other in others:
                other.result()
        elif self._step_s:
            time.sleep(self._step_s)
        self._num_steps += 1
        now_ns = time.monotonic_ns()
        return [self._advance(live, now_ns) for live in list(self._live.values())]

    def _advance(self, live: _Live, now_ns: int) -> StepOutput:
        position, reason, usage = live.num_said, None, None
        live.num_said += 1
        self._num_tokens += 1
        if live.num_said == live.max_tokens:
            reason, usage = "length", Usage(len(live.prompt), live.num_said)
            del self._live[live.request_id]
        text = f"{live.added_ns} {now_ns} " if live.prompt[0] == STAMP else WORD
        return StepOutput(live.request_id, 0, position, (1000 + position,), text, reason, usage)  # type: ignore[arg-type]

    def stats(self) -> EngineStats:
        total, ms = self.num_kv_tokens // 16, self._step_s * 1e3
        figures = {"kv_blocks_total": total, "kv_blocks_free": total, "block_size": 16, "num_running": len(self._live)}
        figures |= {"steps": self._num_steps, "decode_tokens": self._num_tokens, "step_ms_p50": ms, "step_ms_p99": ms}
        # A step takes as long with any tokens. Those of prompts have a time all the same, from which the pace follows.
        costs_ms = (ms, ms / 1000, ms / 100) if ms else None
        return EngineStats(**{"prefill_tokens": 0, **figures}, step_costs_ms=costs_ms)  # type: ignore[arg-type]


def _work(rounds: int) -> None:
    hashlib.pbkdf2_hmac("sha256", b"penstock", b"salt", rounds)


def _rounds_of(seconds: float) -> int:
    """How much work takes so long on an idle core."""
    started_s = time.perf_counter()
    _work(20_000)
    return max(1, int(20_000 * seconds / (time.perf_counter() - started_s)))
