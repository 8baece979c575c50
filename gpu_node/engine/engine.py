"""The engine: requests in, tokens and text out, one step at a time."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.contract.errors import ConflictError, NotFoundError, RequestError
from penstock.contract.job import SamplingParams, Usage, seed_of
from penstock.gpu_node.engine.blocks import BlockPool
from penstock.gpu_node.engine.config import EngineConfig
from penstock.gpu_node.engine.offline import Prompt, gather, spread
from penstock.gpu_node.engine.records import EngineStats, Generation, ResumedChoice, StepOutput
from penstock.gpu_node.engine.request import LiveChoice, LiveRequest, RequestLimits, check_request, check_resume
from penstock.gpu_node.engine.scheduler import Scheduler, Step
from penstock.gpu_node.engine.tokenizer import Tokenizer
from penstock.gpu_node.model.protocol import FAILED_TOKEN, LoadedModel, RunnerOptions

_STEP_WINDOW = 256


class Engine:
    """Continuous batching over one model. One thread owns it; `stats` and the tokenizer may be used from others."""

    def __init__(self, config: EngineConfig, *, progress: Callable[[str, float], None] | None = None) -> None:
        """Load the model. `progress` hears the stage and the fraction of it that is done.

        Raises ConfigError for a model that is missing, unsupported or too large for the KV cache it would need.
        """
        self._model = _load(config, progress or _no_progress)
        self._runner = self._model.runner
        self._tokenizer = Tokenizer(self._model.folder, vocab_size=self._model.vocab_size)
        self._pool = BlockPool(self._runner.num_blocks, enable_prefix_caching=config.enable_prefix_caching)
        self._block_size = config.block_size
        self._limits = RequestLimits(
            vocab_size=self._model.vocab_size,
            # A sequence that the pool cannot hold alone could never finish.
            max_model_len=min(self._model.max_model_len, self.num_kv_tokens),
            eos_token_ids=self._model.eos_token_ids | self._tokenizer.eos_token_ids,
        )
        self._scheduler = Scheduler(
            self._pool,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=self._limits.max_model_len,
        )
        self._requests: dict[str, LiveRequest] = {}
        self._finished_usage: dict[str, Usage] = {}
        self._ended_by_replay: list[tuple[LiveRequest, LiveChoice]] = []
        self._step_ms: deque[float] = deque(maxlen=_STEP_WINDOW)
        self._num_steps = self._prefill_tokens = self._decode_tokens = 0

    def add(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        seed: int,
        resume: Sequence[ResumedChoice] = (),
    ) -> None:
        """Queue a request; its `n` choices share the prompt's blocks.

        `resume` says how far an earlier node got with each choice: generation goes on behind it, text that was not
        logged yet comes with the next output, and a choice with a finish reason stays closed.
        Raises RequestError or PromptTooLongError naming the field, ConflictError for an id that is already here.
        """
        if request_id in self._requests:
            raise ConflictError(f"request {request_id} is already in the engine")
        check_request(prompt_token_ids, params, self._limits)
        check_resume(resume, params, self._limits)
        request = LiveRequest(request_id, prompt_token_ids, params, seed)
        request.open(resume, self._limits, self._tokenizer)
        self._enqueue(request)

    def abort(self, request_id: str) -> None:
        """Drop a request and give its blocks back; nothing happens when it is not here."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        self._ended_by_replay = [ended for ended in self._ended_by_replay if ended[0] is not request]
        for choice in request.live.values():
            if choice.output.finish_reason is None:
                self._scheduler.remove(choice.seq)

    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._requests)

    def step(self) -> list[StepOutput]:
        """Schedule, run, hand out: one forward pass, and what each choice gained by it.

        An exception of the runner that belongs to no single request propagates; the requests stay and may be stepped
        again or aborted.
        """
        self._finished_usage.clear()
        if self._ended_by_replay:
            # Handed out in a call of their own: a runner that raises would take them with it.
            ended, self._ended_by_replay = self._ended_by_replay, []
            return [self._output(request, choice, ()) for request, choice in ended]
        started = time.perf_counter()
        step = self._scheduler.plan()
        if step is None:
            return []
        tokens = self._run(step)
        self._count(step)
        outputs = []
        for seq, token in zip(self._scheduler.commit(step), tokens.tolist(), strict=True):
            request = self._requests[seq.request_id]
            outputs.append(self._advance(request, request.live[seq.choice], token))
        self._step_ms.append((time.perf_counter() - started) * 1e3)
        return outputs

    def usage(self, request_id: str) -> Usage:
        """Tokens of a request so far; known until the `step` after the one that finished it. Raises NotFoundError."""
        request = self._requests.get(request_id)
        usage = request.usage() if request is not None else self._finished_usage.get(request_id)
        if usage is None:
            raise NotFoundError(f"request {request_id} is not in the engine")
        return usage

    def stats(self) -> EngineStats:
        """A snapshot of pool, queue and counters."""
        recent = sorted(self._step_ms) or [0.0]
        return EngineStats(
            kv_blocks_total=self._pool.num_total,
            kv_blocks_free=self._pool.num_free,
            kv_blocks_cached=self._pool.num_cached,
            block_size=self._block_size,
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            num_preemptions=self._scheduler.num_preemptions,
            steps=self._num_steps,
            prefill_tokens=self._prefill_tokens,
            decode_tokens=self._decode_tokens,
            step_ms_p50=recent[len(recent) // 2],
            step_ms_p99=recent[len(recent) * 99 // 100],
            prefix_hit_tokens=self._scheduler.prefix_hit_tokens,
        )

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[Generation]:
        """Run prompts (texts, token ids or chats) to their end, batched; results in the prompts' order.

        Raises RequestError when other requests are in the engine, whose outputs would be lost.
        """
        if self.has_work():
            raise RequestError("generate needs an engine without other requests")
        batch = spread(prompts, params, self._tokenizer)
        outputs: list[StepOutput] = []
        try:
            for i, (prompt, wanted) in enumerate(batch):
                self.add(str(i), prompt, wanted, seed=seed_of(str(i), wanted))
            while self.has_work():
                outputs += self.step()
        except BaseException:
            for i in range(len(batch)):
                self.abort(str(i))
            raise
        return gather(batch, outputs)

    def check_integrity(self) -> None:
        """Raise InvariantError unless the block pool is consistent; O(blocks), for tests and idle times."""
        self._pool.check_integrity()

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._tokenizer

    @property
    def max_model_len(self) -> int:
        """Most tokens that prompt and output of one choice may have together."""
        return self._limits.max_model_len

    @property
    def vocab_size(self) -> int:
        """Rows of the model's output; token ids are below it."""
        return self._limits.vocab_size

    @property
    def num_kv_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        return self._pool.num_total * self._block_size

    @property
    def revision(self) -> str:
        """Names weights, tokenizer and dtype: engines of equal revision continue each other's choices."""
        return self._model.revision

    def _enqueue(self, request: LiveRequest) -> None:
        if not request.live:
            self._finished_usage[request.request_id] = request.usage()
            return
        self._requests[request.request_id] = request
        for choice in request.live.values():
            if choice.output.finish_reason is None:
                self._scheduler.add(choice.seq)
            else:
                self._ended_by_replay.append((request, choice))

    def _run(self, step: Step) -> NDArray[np.int32]:
        try:
            return self._runner.submit(step.plan).result()
        except BaseException:
            self._scheduler.roll_back(step)
            raise

    def _count(self, step: Step) -> None:
        self._num_steps += 1
        self._decode_tokens += len(step.plan.sample_seqs)
        self._prefill_tokens += sum(
            count for seq, count in zip(step.seqs, step.counts, strict=True) if seq.num_computed < seq.num_tokens - 1
        )

    def _advance(self, request: LiveRequest, choice: LiveChoice, token: int) -> StepOutput:
        if token == FAILED_TOKEN:
            choice.output.fail()
            self._runner.zero_blocks(self._scheduler.discard(choice.seq))
            return self._output(request, choice, ())
        choice.seq.append(token)
        choice.output.push(token)
        request.completion_tokens += 1
        if choice.output.finish_reason is not None:
            self._scheduler.remove(choice.seq)
        return self._output(request, choice, (token,))

    def _output(self, request: LiveRequest, choice: LiveChoice, token_ids: tuple[int, ...]) -> StepOutput:
        text, choice.owed = choice.owed + choice.output.take_text(), ""
        ended = choice.output.finish_reason is not None
        return StepOutput(
            request_id=request.request_id,
            choice=choice.seq.choice,
            position=choice.output.num_tokens - len(token_ids),
            token_ids=token_ids,
            text=text,
            finish_reason=choice.output.finish_reason,
            usage=self._end_choice(request, choice) if ended else None,
        )

    def _end_choice(self, request: LiveRequest, choice: LiveChoice) -> Usage | None:
        """Close a choice; the request's usage when it was the last one."""
        del request.live[choice.seq.choice]
        if request.live:
            return None
        del self._requests[request.request_id]
        usage = self._finished_usage[request.request_id] = request.usage()
        return usage


def _load(config: EngineConfig, progress: Callable[[str, float], None]) -> LoadedModel:
    # A thread that spins at an OpenMP barrier keeps the processor from the one it waits for: where other processes run
    # too, steps were seen to take 6 times as long; one that sleeps at once costs 40 % of an idle machine's speed. A
    # short spin (about 20 µs) has neither fault. The runtime reads this when torch is loaded for the first time.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    # Only here does torch come in: whoever imports the engine for its records does not pay for it.
    from penstock.gpu_node.model.load import load_model

    options = RunnerOptions(
        dtype=config.dtype,
        block_size=config.block_size,
        num_blocks=config.wanted_blocks,
        kv_cache_gib=config.kv_cache_gib,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        num_threads=config.num_threads,
    )
    return load_model(config.model, options, progress)


def _no_progress(stage: str, fraction: float) -> None:
    """Nobody wants to know."""
