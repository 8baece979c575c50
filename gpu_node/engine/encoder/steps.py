"""Which texts the next step computes: foreground work first, in the order of the pool's policy."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from penstock.contract.errors import InvariantError
from penstock.contract.priority import NUM_LEVELS
from penstock.gpu_node.engine.config import EngineConfig
from penstock.gpu_node.engine.records import EngineRequest
from penstock.gpu_node.engine.texts import PackedTexts
from penstock.gpu_node.model.text_protocol import TextBatch
from penstock.queue.policy import PolicyConfig, choose
from penstock.queue.policy_state import PolicyState

STEP_TOKENS = 2048
"""Tokens of a step, where `max_num_batched_tokens` is not higher: a pass over fewer tokens uses the CPU worse."""
FOREGROUND_MEMORY_S = 60.0
"""Seconds after the last foreground work for which steps of background work stay short."""
WINDOW_S = 10.0
"""Seconds of steps for which background work above or below its share is remembered."""


@dataclass(slots=True, eq=False)
class LiveTexts:
    """A request whose texts are computed. The policy sees it as a candidate (`penstock.queue.policy.Candidate`)."""

    request: EngineRequest
    texts: PackedTexts
    submitted_ms: float
    next_text: int = 0
    """The first text that is in no step yet."""
    begun_s: float = 0.0
    """When its first step began; 0 before that."""
    rows: dict[int, NDArray[np.float32]] = field(default_factory=dict)
    """What was computed of each text: a row, or a row for each token."""

    @property
    def job_id(self) -> str:
        """The id, which breaks ties."""
        return self.request.request_id

    @property
    def tenant(self) -> str:
        """The tenant that is charged for it."""
        return self.request.tenant

    @property
    def level(self) -> int:
        """The level of the job's class and kind of work."""
        return self.request.level

    @property
    def cost(self) -> int:
        """Its tokens."""
        return len(self.texts)

    @property
    def remaining_cost(self) -> int:
        """Its tokens that are in no step yet."""
        return len(self.texts) - int(self.texts.starts[self.next_text])

    @property
    def charge(self) -> float:
        """What its tenant is charged when it starts."""
        return self.cost / self.request.weight

    @property
    def is_begun(self) -> bool:
        """Whether a step had some of its texts."""
        return self.next_text > 0

    @property
    def has_waiting(self) -> bool:
        """Whether texts are in no step yet."""
        return self.next_text < self.texts.num_texts

    @property
    def is_complete(self) -> bool:
        """Whether all texts are computed."""
        return len(self.rows) == self.texts.num_texts

    def tokens_of(self, text: int) -> int:
        """Return the tokens of a text."""
        return int(self.texts.starts[text + 1] - self.texts.starts[text])


@dataclass(frozen=True, slots=True, eq=False)
class TextSpan:
    """Neighboring texts of one request in a step."""

    live: LiveTexts
    first: int
    end: int

    @property
    def num_tokens(self) -> int:
        """Their tokens."""
        starts = self.live.texts.starts
        return int(starts[self.end] - starts[self.first])

    @property
    def lengths(self) -> NDArray[np.int32]:
        """The tokens of each of them."""
        return np.diff(self.live.texts.starts[self.first : self.end + 1])


def batch_of(spans: Iterable[TextSpan]) -> TextBatch:
    """Return the texts of a step as one batch."""
    ids, types, lengths = [], [], []
    for span in spans:
        texts = span.live.texts
        part = slice(texts.starts[span.first], texts.starts[span.end])
        ids.append(texts.token_ids[part])
        types.append(texts.types[part])
        lengths.append(span.lengths)
    starts = np.concatenate(([0], np.cumsum(np.concatenate(lengths)))).astype(np.int32)
    return TextBatch(np.concatenate(ids), starts, np.concatenate(types))


def halves_of(spans: list[TextSpan]) -> list[list[TextSpan]]:
    """Return the texts of a step in two parts, or in one if it is a single text."""
    if len(spans) > 1:
        middle = len(spans) // 2
        return [spans[:middle], spans[middle:]]
    (span,) = spans
    if span.end - span.first == 1:
        return [spans]
    middle = (span.first + span.end) // 2
    return [[TextSpan(span.live, span.first, middle)], [TextSpan(span.live, middle, span.end)]]


class TextSteps:
    """The requests with texts that are in no step yet, and the choice of those for the next one."""

    def __init__(self, config: EngineConfig) -> None:
        self.max_tokens = max(STEP_TOKENS, config.max_num_batched_tokens)
        """Tokens of a step; a longer text runs alone."""
        self._policy = PolicyConfig(config.scheduling_policy, config.aging_ms, config.bypass_ms)
        self._state = PolicyState()
        self._background_share = config.background_share
        self._background_s = config.background_step_ms / 1000
        self._live: list[LiveTexts] = []
        self._again = deque[list[TextSpan]]()
        """Parts of failed steps."""
        self._tokens_per_s = 0.0
        self._foreground_at_s = -FOREGROUND_MEMORY_S
        self._lacking_s = 0.0
        self.is_background_queued = False
        """Whether background work waits outside the engine."""

    def __bool__(self) -> bool:
        return bool(self._live or self._again)

    @property
    def num_waiting(self) -> int:
        """The requests with texts that are in no step yet."""
        return len(self._live)

    @property
    def background_due(self) -> bool:
        """Whether background work is below its share of the engine's time. Any thread may read it."""
        return self._lacking_s > 0

    def add(self, live: LiveTexts) -> None:
        """Queue a request."""
        self._live.append(live)

    def drop(self, live: LiveTexts) -> None:
        """Forget a request that ends."""
        self._live = [one for one in self._live if one is not live]
        again = ([span for span in spans if span.live is not live] for spans in self._again)
        self._again = deque(spans for spans in again if spans)

    def retry(self, spans: list[TextSpan]) -> None:
        """Compute these texts again, before all others."""
        self._again.appendleft(spans)

    def next_step(self) -> list[TextSpan]:
        """Return the texts of the next step; none if no text waits."""
        if self._again:
            return self._again.popleft()
        if not self._live:
            return []
        now_s = time.monotonic()
        foreground = [one for one in self._live if not one.request.background]
        background = [one for one in self._live if one.request.background]
        if foreground:
            self._foreground_at_s = now_s
        is_turn_of_background = bool(background) and (not foreground or self.background_due)
        chosen, limit = foreground, self.max_tokens
        if is_turn_of_background:
            chosen, limit = background, self._limit_of_background(now_s)
        spans = self._fill(chosen, limit, now_s * 1e3)
        self._live = [one for one in self._live if one.has_waiting]
        return spans

    def note_foreground(self) -> None:
        """Note that foreground work may have to wait for a step, here or on another node of this host."""
        self._foreground_at_s = time.monotonic()

    def note_step(self, spans: list[TextSpan], took_s: float) -> None:
        """Count a computed step."""
        num_tokens = sum(span.num_tokens for span in spans)
        speed = num_tokens / max(took_s, 1e-6)
        self._tokens_per_s = speed if not self._tokens_per_s else 0.8 * self._tokens_per_s + 0.2 * speed
        is_background = all(span.live.request.background for span in spans)
        waits = self.is_background_queued or any(one.request.background for one in self._live)
        if not waits:
            self._lacking_s = 0.0
            return
        share = self._background_share
        gained = share * took_s - (took_s if is_background else 0.0)
        self._lacking_s = max(-share * WINDOW_S, min(share * WINDOW_S, self._lacking_s + gained))

    def _limit_of_background(self, now_s: float) -> int:
        """Return the tokens of a step of background work, for which foreground work may have to wait."""
        if now_s - self._foreground_at_s >= FOREGROUND_MEMORY_S or not self._tokens_per_s:
            return self.max_tokens
        return max(1, min(self.max_tokens, int(self._background_s * self._tokens_per_s)))

    def _fill(self, candidates: list[LiveTexts], limit: int, now_ms: float) -> list[TextSpan]:
        """Return texts up to a limit of tokens, at least one. Begun requests go on first."""
        spans, left = list[TextSpan](), [limit]

        def fits(live: LiveTexts, _: int) -> bool:
            span = _span_within(live, left[0], is_first=not spans)
            if span is None:
                return False
            spans.append(span)
            live.next_text = span.end
            left[0] -= span.num_tokens
            return True

        begun = sorted((one for one in candidates if one.is_begun), key=lambda one: (one.level, one.submitted_ms))
        for live in begun:
            fits(live, live.level)
        waiting = [one for one in candidates if not one.is_begun]
        if waiting and left[0] > 0:
            self._enter(waiting)
            choose(waiting, self._policy, self._state, now_ms, fits)
        if not spans:
            raise InvariantError("texts wait, but none of them is in the next step")
        return spans

    def _enter(self, waiting: list[LiveTexts]) -> None:
        """Tell the policy which tenants have waiting requests."""
        present = dict.fromkeys((one.level, one.tenant) for one in waiting)
        for level in range(NUM_LEVELS):
            virtual_times = self._state.virtual_times[level]
            for tenant in [tenant for tenant in virtual_times.times if (level, tenant) not in present]:
                virtual_times.leave(tenant)
        for level, tenant in present:
            self._state.virtual_times[level].enter(tenant)


def _span_within(live: LiveTexts, limit: int, *, is_first: bool) -> TextSpan | None:
    """Return a request's next texts within a limit of tokens; a first text may exceed it."""
    end = live.next_text
    while end < live.texts.num_texts:
        num_tokens = live.tokens_of(end)
        if num_tokens > limit and not (is_first and end == live.next_text):
            break
        limit -= num_tokens
        end += 1
    return TextSpan(live, live.next_text, end) if end > live.next_text else None
