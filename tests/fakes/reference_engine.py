"""An engine whose every token is a known function of the request: token_i = H(seed, choice, i, previous).

It has the real engine's interface, and a delay per step and a limit on sequences for tests. No model, no torch.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.contract.errors import PromptTooLongError
from penstock.contract.job import SamplingParams, Usage, seed_of
from penstock.gpu_node.engine.records import EngineStats, ResumedChoice, StepOutput

VOCAB = 26
BLOCK_SIZE = 16


def reference_token(seed: int, choice: int, position: int, previous: int) -> int:
    """Token `position` of a choice."""
    data = f"{seed}:{choice}:{position}:{previous}".encode()
    return hashlib.blake2b(data, digest_size=1).digest()[0] % VOCAB


def reference_tokens(job_id: str, params: SamplingParams, prompt: Sequence[int], choice: int = 0) -> list[int]:
    """All tokens of a choice."""
    seed, tokens = seed_of(job_id, params), [prompt[-1]]
    for i in range(params.max_tokens or 16):
        tokens.append(reference_token(seed, choice, i, tokens[-1]))
    return tokens[1:]


def text_of(tokens: Sequence[int]) -> str:
    """A token's text is a letter."""
    return "".join(chr(97 + t % VOCAB) for t in tokens)


class ReferenceTokenizer:
    """One token per byte."""

    max_token_bytes = 1

    def encode(self, text: str) -> list[int]:
        """Bytes."""
        return list(text.encode()) or [0]

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Bytes of all turns."""
        return self.encode("\n".join(m["content"] for m in messages))


@dataclass
class _Live:
    request_id: str
    choice: int
    prompt: Sequence[int]
    params: SamplingParams
    seed: int
    tokens: list[int]


class ReferenceEngine:
    """Every waiting or running choice gains one token a step, up to `max_num_seqs` at once."""

    def __init__(
        self, *, step_s: float = 0.0, max_num_seqs: int = 64, kv_tokens: int = 65536, revision: str = "reference"
    ) -> None:
        self.tokenizer = ReferenceTokenizer()
        self.max_model_len = 4096
        self.num_kv_tokens = kv_tokens
        self.revision = revision
        self.batches: list[int] = []
        self.callers: list[tuple[int, str]] = []
        self._step_s = step_s
        self._max_num_seqs = max_num_seqs
        self._live: list[_Live] = []
        self._done_tokens = 0

    def add(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        seed: int,
        resume: Sequence[ResumedChoice] = (),
        priority: int = 1,
        tenant: str = "default",
    ) -> None:
        """Queues a request."""
        self.callers.append((priority, tenant))
        if len(prompt_token_ids) >= self.max_model_len:
            raise PromptTooLongError(f"prompt has {len(prompt_token_ids)} tokens; limit 4095", param="prompt")
        for choice in range(params.n):
            logged = resume[choice] if resume else ResumedChoice((), "", None)
            if logged.finish_reason is None:
                live = _Live(request_id, choice, prompt_token_ids, params, seed, list(logged.token_ids))
                self._live.append(live)

    def prepare(self, params: SamplingParams) -> None:
        """Nothing takes long."""

    def abort(self, request_id: str) -> None:
        """Forgets a request."""
        self._live = [live for live in self._live if live.request_id != request_id]

    def has_work(self) -> bool:
        """Whether anything is live."""
        return bool(self._live)

    def bind_thread(self) -> None:
        """Any core will do."""

    def wait(self) -> None:
        """No step runs beside its caller."""

    def step(self) -> list[StepOutput]:
        """One token for each of the first `max_num_seqs`."""
        if self._step_s:
            time.sleep(self._step_s)
        batch = self._live[: self._max_num_seqs]
        self.batches.append(len(batch))
        return [self._advance(live) for live in batch]

    def _advance(self, live: _Live) -> StepOutput:
        position = len(live.tokens)
        previous = live.tokens[-1] if live.tokens else live.prompt[-1]
        token = reference_token(live.seed, live.choice, position, previous)
        live.tokens.append(token)
        self._done_tokens += 1
        ended = len(live.tokens) >= (live.params.max_tokens or 16)
        usage = None
        if ended:
            self._live.remove(live)
            if not any(other.request_id == live.request_id for other in self._live):
                usage = Usage(len(live.prompt), live.params.n * len(live.tokens))
        reason = "length" if ended else None
        return StepOutput(live.request_id, live.choice, position, (token,), text_of([token]), reason, usage)

    def stats(self) -> EngineStats:
        """Figures in the shape of the real ones."""
        total = self.num_kv_tokens // BLOCK_SIZE
        used = sum(-(-(len(live.prompt) + len(live.tokens)) // BLOCK_SIZE) for live in self._live)
        return EngineStats(
            total, total - used, 0, BLOCK_SIZE, len(self._live), 0, 0, len(self.batches), 0, self._done_tokens,
            self._step_s * 1e3, self._step_s * 1e3, 0,
        )  # fmt: skip
