"""An engine whose tokens are a known function of the request: token_i = H(seed, choice, i, previous).

It has the real engine's interface, a configurable delay per step and a limit on sequences. It needs no model and no
torch.
"""

from __future__ import annotations

import hashlib
import math
import random
import struct
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from penstock.contract.adapters import AdapterRef
from penstock.contract.errors import PromptTooLongError, RequestError
from penstock.contract.job import SamplingParams, seed_of
from penstock.contract.output import Choice, TokenLogprobs, Usage
from penstock.contract.tasks import Embed
from penstock.contract.tool_formats import NO_CALLS
from penstock.gpu_node.engine.records import EngineRequest, EngineStats, ResumedChoice, StepOutput
from penstock.gpu_node.engine.text.output import EndReason
from penstock.gpu_node.engine.text.prompts import NO_PROMPTS
from penstock.gpu_node.engine.timings import STEP_SECONDS
from penstock.gpu_node.model.protocol import NO_RANKS, RankStats
from penstock.runtime.histogram import Histogram
from penstock.runtime.process_memory import resident_bytes

VOCAB = 26
BLOCK_SIZE = 16
MAX_REMEMBERED = 4096
FAKE_DIMENSIONS = 8
"""Of an embedding."""


def reference_token(seed: int, choice: int, position: int, previous: int) -> int:
    """Return token `position` of a choice."""
    data = f"{seed}:{choice}:{position}:{previous}".encode()
    return hashlib.blake2b(data, digest_size=1).digest()[0] % VOCAB


def reference_tokens(job_id: str, params: SamplingParams, prompt: Sequence[int], choice: int = 0) -> list[int]:
    """Return all tokens of a choice."""
    return list(reference_choice(job_id, params, prompt, choice).token_ids)


def reference_choice(job_id: str, params: SamplingParams, prompt: Sequence[int], choice: int = 0) -> Choice:
    """Return a choice as an engine without faults generates it."""
    live = _Live(job_id, choice, prompt, params, seed_of(job_id, params))
    while (reason := live.reason) is None:
        live.append()
    logprobs = tuple(map(live.logprobs_at, range(len(live.tokens)))) if params.logprobs is not None else ()
    return Choice(choice, live.said[: live.safe_chars], tuple(live.tokens), reason, logprobs)


def reference_prompt_logprobs(params: SamplingParams, prompt: Sequence[int]) -> tuple[TokenLogprobs, ...]:
    """Return the log-probabilities of a prompt as an engine without faults computes them."""
    if params.prompt_logprobs is None:
        return ()
    rest = (_token_logprobs(token, at, params.prompt_logprobs) for at, token in enumerate(prompt) if at)
    return TokenLogprobs((prompt[0],), (), (bytes([prompt[0]]),)), *rest


def _token_logprobs(token: int, position: int, num_logprobs: int) -> TokenLogprobs:
    ids = (token, *range(num_logprobs))
    return TokenLogprobs(ids, tuple(-1.0 - position - i for i in range(len(ids))), tuple(bytes([one]) for one in ids))


def text_of(tokens: Sequence[int]) -> str:
    """A token's text is a letter."""
    return "".join(chr(97 + t % VOCAB) for t in tokens)


class ReferenceTokenizer:
    """One token per byte."""

    max_token_bytes = 1
    tool_format = NO_CALLS
    embedding_prompts = NO_PROMPTS
    reasoning_parser = "none"
    thinking_switches: tuple[str, ...] = ()
    takes_effort = False

    def reasoning_rule(self, template_kwargs: str | None) -> None:
        """Return that no answer reasons."""

    def encode(self, text: str, *, framed: bool = True) -> list[int]:
        """Return the bytes of a text."""
        return list(text.encode()) or [0]

    def encode_prompt(self, text: str, owner: object) -> list[int]:
        """Return what `encode` does."""
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
        """Return the bytes of all messages."""
        return self.encode("\n".join(m["content"] for m in messages))

    def names_of(self, token_ids: Sequence[int]) -> list[str]:
        """Return the tokens' letters."""
        return [text_of([token_id]) for token_id in token_ids]

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Return the text of bytes."""
        return bytes(token_ids).decode(errors="replace")


def fake_embedding(token_ids: Sequence[int], wanted: Embed) -> list[float]:
    """Return a vector of length 1: how often each remainder of eight is among the pooled tokens, plus one."""
    pooled = {"last": token_ids[-1:], "cls": token_ids[:1]}.get(wanted.pooling or "mean", token_ids)
    counts = [1.0 + sum(token % FAKE_DIMENSIONS == one for token in pooled) for one in range(FAKE_DIMENSIONS)]
    kept = counts[: wanted.dimensions]
    return [count / math.hypot(*kept) for count in kept]


def packed_fake_embedding(token_ids: Sequence[int], wanted: Embed) -> bytes:
    """Return the vector as an engine's output holds it."""
    if (wanted.dimensions or 0) > FAKE_DIMENSIONS:
        message = f"dimensions is {wanted.dimensions}, but this model's embeddings have {FAKE_DIMENSIONS}"
        raise RequestError(message, param="dimensions")
    vector = fake_embedding(token_ids, wanted)
    return struct.pack(f"<{len(vector)}f", *vector)


@dataclass
class _Live:
    """A waiting or running choice. `said`: the text of all tokens; `released`: the number of characters emitted."""

    request_id: str
    choice: int
    prompt: Sequence[int]
    params: SamplingParams
    seed: int
    tokens: list[int] = field(default_factory=list)
    said: str = ""
    released: int = 0
    embed: Embed | None = None
    background: bool = False

    def append(self) -> int:
        """Append the next token, which depends on the previous tokens, and on the seed if the request samples."""
        previous = self.tokens[-1] if self.tokens else self.prompt[-1]
        seed = self.seed if self.params.temperature else 0
        token = reference_token(seed, self.choice, len(self.tokens), previous)
        self.tokens.append(token)
        self.said += text_of([token])
        return token

    def logprobs_at(self, position: int) -> TokenLogprobs:
        """Return the log-probabilities at a position: a function of the token and the position."""
        return _token_logprobs(self.tokens[position], position, self.params.logprobs or 0)

    @property
    def reason(self) -> EndReason | None:
        """Return the finish reason, None if the choice has not finished."""
        if self._stop_at is not None:
            return "stop"
        return "length" if len(self.tokens) >= (self.params.max_tokens or 16) else None

    @property
    def safe_chars(self) -> int:
        """Return how many characters are not part of a stop string and cannot become part of one."""
        if self._stop_at is not None:
            return self._stop_at
        if self.reason is not None:
            return len(self.said)
        tails = (length for stop in self.params.stop for length in range(1, len(stop)))
        return len(self.said) - max((n for n in tails if self._ends_with_begun_stop(n)), default=0)

    @property
    def _stop_at(self) -> int | None:
        found = [at for at in map(self.said.find, self.params.stop) if at >= 0]
        return min(found) if found else None

    def _ends_with_begun_stop(self, length: int) -> bool:
        return any(len(stop) > length and self.said.endswith(stop[:length]) for stop in self.params.stop)


class ReferenceEngine:
    """Each step gives one token to every choice, up to `max_num_seqs` choices, foreground work first."""

    def __init__(
        self,
        *,
        step_s: float = 0.0,
        max_num_seqs: int = 64,
        kv_tokens: int = 65536,
        revision: str = "reference",
        leaves_core_free: bool = False,
    ) -> None:
        self.tokenizer, self.texts = ReferenceTokenizer(), None
        self.pairs = None
        self.max_model_len = 4096
        self.num_kv_tokens = kv_tokens
        self.window_tokens: tuple[int, int] | None = None
        self.revision = revision
        self.leaves_core_free = leaves_core_free
        self.background_due = False
        self.holds_at: int | None = None
        """A choice that has so many tokens gets no more before this is None."""
        self.sampling_defaults: dict[str, int | float] = {}
        self.batches: deque[int] = deque(maxlen=MAX_REMEMBERED)
        self.callers: deque[tuple[int, str, float]] = deque(maxlen=MAX_REMEMBERED)
        self._num_steps = 0
        self._step_s = step_s
        self._max_num_seqs = max_num_seqs
        self._live: list[_Live] = []
        self._told: dict[str, _Live] = {}
        """Which choice of a request came with its prompt's."""
        self._done_tokens = 0
        self._step_seconds = Histogram(STEP_SECONDS)

    def capabilities(self) -> tuple[str, ...]:
        return ()

    def note_queued_background(self, is_queued: bool) -> None:
        pass

    def has_foreground(self) -> bool:
        return any(not live.background for live in self._live)

    def note_foreground_beside(self) -> None:
        pass

    def add(self, request: EngineRequest) -> None:
        """Queue a request."""
        prompt, params = request.prompt_token_ids, request.params
        self.callers.append((request.level, request.tenant, request.weight))
        if len(prompt) >= self.max_model_len:
            raise PromptTooLongError(f"prompt has {len(prompt)} tokens; limit 4095", param="prompt")
        for choice in range(params.n):
            logged = request.resume[choice] if request.resume else ResumedChoice((), "", None)
            if logged.finish_reason is None:
                live = _Live(request.request_id, choice, prompt, params, request.seed, list(logged.token_ids))
                live.embed, live.background = request.embed, request.background
                live.said, live.released = text_of(live.tokens), len(logged.text)
                self._live.append(live)

    def prepare(self, params: SamplingParams, adapter: AdapterRef | None = None, *, tenant: str = "default") -> None:
        """Do nothing: no part of a request takes long."""

    def adapters(self) -> dict[str, str]:
        """The loaded adapters: none."""
        return {}

    def abort(self, request_id: str) -> None:
        """Abort a request."""
        self._live = [live for live in self._live if live.request_id != request_id]
        self._told.pop(request_id, None)

    def has_work(self) -> bool:
        """Whether any choice waits or runs."""
        return bool(self._live)

    def bind_thread(self) -> None:
        """Do nothing: the engine needs no particular core."""

    def wait(self) -> None:
        """Do nothing: steps run on the caller's thread."""

    def step(self) -> list[StepOutput]:
        """Generate one token for each of the first `max_num_seqs` choices."""
        began_s = time.perf_counter()
        if self._step_s:
            time.sleep(self._step_s)
        self._step_seconds.note(time.perf_counter() - began_s)
        going_on = [live for live in self._live if self.holds_at is None or len(live.tokens) < self.holds_at]
        batch = sorted(going_on, key=lambda live: live.background)[: self._max_num_seqs]
        self._num_steps += 1
        self.batches.append(len(batch))
        return [self._advance(live) for live in batch]

    def _advance(self, live: _Live) -> StepOutput:
        if live.embed is not None:
            self._live.remove(live)
            vector = packed_fake_embedding(live.prompt, live.embed)
            return StepOutput(live.request_id, 0, 0, (), "", "stop", Usage(len(live.prompt), 0), embedding=vector)
        position = len(live.tokens)
        # One that a log left without its end has all its tokens.
        fresh = () if live.reason else (live.append(),)
        self._done_tokens += len(fresh)
        is_first = position == 0 and self._told.setdefault(live.request_id, live) is live
        reason, usage = live.reason, None
        if reason:
            self._live.remove(live)
            if not any(other.request_id == live.request_id for other in self._live):
                usage = Usage(len(live.prompt), live.params.n * len(live.tokens))
                self._told.pop(live.request_id, None)
        text = live.said[live.released : live.safe_chars]
        live.released += len(text)
        logprobs = (live.logprobs_at(position),) if fresh and live.params.logprobs is not None else ()
        prompt = reference_prompt_logprobs(live.params, live.prompt) if is_first else ()
        output = StepOutput(live.request_id, live.choice, position, fresh, text, reason, usage)
        return replace(output, logprobs=logprobs, prompt_logprobs=prompt)

    def stats(self) -> EngineStats:
        """Return statistics of the same shape as the real engine's."""
        total = self.num_kv_tokens // BLOCK_SIZE
        used = sum(-(-(len(live.prompt) + len(live.tokens)) // BLOCK_SIZE) for live in self._live)
        return EngineStats(
            kv_blocks_total=total,
            kv_blocks_free=total - used,
            kv_tokens_used=sum(len(live.prompt) + len(live.tokens) for live in self._live),
            block_size=BLOCK_SIZE,
            num_running=len(self._live),
            steps=self._num_steps,
            prefill_tokens=0,
            decode_tokens=self._done_tokens,
            step_ms_p50=self._step_s * 1e3,
            step_ms_p99=self._step_s * 1e3,
            step_seconds=self._step_seconds,
            process_bytes=resident_bytes(),
            weight_bytes=1 << 30,
            arithmetic="reference",
        )

    @property
    def ranks(self) -> RankStats:
        return NO_RANKS

    def requests_in_flight(self) -> set[str]:
        """Return the ids of the requests in the batch."""
        return {live.request_id for live in self._live[: self._max_num_seqs]}

    def num_preemptions(self, request_id: str) -> int:
        return 0

    def memory_trail(self) -> list[str]:
        """Return no entries: blocks are only counted."""
        return []


class FailingEngine(ReferenceEngine):
    """Fails at some tokens, as an engine does whose model gives NaN: each time at others."""

    def __init__(self, *, error_share: float, **options: Any) -> None:
        super().__init__(**options)
        self._error_share = error_share
        self._random = random.Random(time.monotonic_ns())

    def _advance(self, live: _Live) -> StepOutput:
        if live.embed is None and self._random.random() < self._error_share:
            self._live.remove(live)
            return StepOutput(live.request_id, live.choice, len(live.tokens), (), "", "error", None)
        return super()._advance(live)


class DifferingEngine(ReferenceEngine):
    """Gives a sampled request other tokens at each take, as an engine does whose tokens depend on its other work."""

    def add(self, request: EngineRequest) -> None:
        """Queue a request."""
        super().add(replace(request, seed=random.getrandbits(32)))


_NUM_BULK, _MAX_BULK = 4096, 8192
_BULK_IDS = tuple(1000 + i * 7919 % 48_000 for i in range(_NUM_BULK + _MAX_BULK))
_BULK_TEXT = "".join(f"{i:04d}"[-3:] + " " for i in _BULK_IDS)


def bulk_output(prompt: Sequence[int], start: int, end: int) -> tuple[tuple[int, ...], str]:
    """Return the tokens of a BulkEngine from one position to another, and their text: four characters each."""
    first = sum(prompt) % _NUM_BULK
    return _BULK_IDS[first + start : first + end], _BULK_TEXT[4 * (first + start) : 4 * (first + end)]


class BulkEngine(ReferenceEngine):
    """Each step gives many tokens to a choice. Ids and texts are as long as those of a real vocabulary."""

    def __init__(self, *, tokens_per_step: int, **options: Any) -> None:
        super().__init__(**options)
        self._tokens_per_step = tokens_per_step

    def _advance(self, live: _Live) -> StepOutput:
        position, limit = len(live.tokens), min(live.params.max_tokens or 16, _MAX_BULK)
        ids, text = bulk_output(live.prompt, position, min(limit, position + self._tokens_per_step))
        live.tokens += ids
        self._done_tokens += len(ids)
        if len(live.tokens) < limit:
            return StepOutput(live.request_id, live.choice, position, ids, text, None, None)
        self._live.remove(live)
        return StepOutput(live.request_id, live.choice, position, ids, text, "length", Usage(len(live.prompt), limit))
