"""The engine: requests in, tokens and text out, one step at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.contract.errors import ConflictError, NotFoundError, RequestError
from penstock.contract.job import SamplingParams, Usage, seed_of
from penstock.gpu_node.engine.blocks import BlockPool
from penstock.gpu_node.engine.config import EngineConfig
from penstock.gpu_node.engine.flight import Flight, StepTimes
from penstock.gpu_node.engine.loading import load
from penstock.gpu_node.engine.offline import Prompt, gather, spread
from penstock.gpu_node.engine.records import EngineStats, Generation, ResumedChoice, StepOutput
from penstock.gpu_node.engine.request import LiveChoice, LiveRequest, RequestLimits, check_request, check_resume
from penstock.gpu_node.engine.scheduler import Landed, Scheduler
from penstock.gpu_node.engine.sequence import Sequence as Choice
from penstock.gpu_node.engine.tokenizer import Tokenizer
from penstock.gpu_node.model.protocol import FAILED_TOKEN


class Engine:
    """Continuous batching over one model. One thread owns it; `stats` and the tokenizer may be used from others."""

    def __init__(self, config: EngineConfig, *, progress: Callable[[str, float], None] | None = None) -> None:
        """Load the model. `progress` hears the stage and the fraction of it that is done.

        Raises ConfigError for a model that is missing, unsupported or too large for the KV cache it would need.
        """
        self._model = load(config, progress or _no_progress)
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
        self._live: dict[Choice, LiveChoice] = {}
        self._ended_by_replay: list[LiveChoice] = []
        self._flight: Flight | None = None
        self._times = StepTimes()
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
        self._ended_by_replay = [ended for ended in self._ended_by_replay if ended.request is not request]
        for choice in request.live.values():
            if self._live.pop(choice.seq, None) is not None:
                self._scheduler.remove(choice.seq)

    def bind_thread(self) -> None:
        """Say that the calling thread does nothing but step: it may be kept on a core of its own."""
        self._runner.bind_thread()

    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._requests) or self._flight is not None

    def wait(self) -> None:
        """Block until `step` would not: what is added or aborted before it then counts for the step it submits."""
        if self._flight is not None:
            self._flight.wait()

    def step(self) -> list[StepOutput]:
        """Land the step in flight, launch the next one, and hand out, while that runs, what the landed one gave.

        A stop string is thus found one step late, and the token that its choice gained meanwhile is dropped. An
        exception of the runner that belongs to no single request propagates; the requests stay and may be stepped
        again or aborted.
        """
        self._finished_usage.clear()
        landed = self._land()
        self._launch()
        return self._hand_out(landed)

    def usage(self, request_id: str) -> Usage:
        """Tokens of a request so far; known until the `step` after the one that finished it. Raises NotFoundError."""
        request = self._requests.get(request_id)
        usage = request.usage() if request is not None else self._finished_usage.get(request_id)
        if usage is None:
            raise NotFoundError(f"request {request_id} is not in the engine")
        return usage

    def stats(self) -> EngineStats:
        """A snapshot of pool, queue and counters."""
        times = self._times
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
            step_ms_p50=times.step.percentile(50),
            step_ms_p99=times.step.percentile(99),
            prefix_hit_tokens=self._scheduler.prefix_hit_tokens,
            schedule_ms=times.schedule.mean(),
            prepare_ms=times.prepare.mean(),
            forward_ms=times.forward.mean(),
            sample_ms=times.sample.mean(),
            output_ms=times.output.mean(),
        )

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[Generation]:
        """Run prompts (texts, token ids or chats) to their end, batched; results in the prompts' order.

        Raises RequestError when other requests are in the engine, whose outputs would be lost.
        """
        if self._requests:
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
                self._live[choice.seq] = choice
                self._scheduler.add(choice.seq)
            else:
                self._ended_by_replay.append(choice)

    def _land(self) -> Landed | None:
        """Wait for the step in flight and commit its tokens; choices that end by a token or a limit leave here."""
        if self._flight is None:
            return None
        # An interrupt while waiting leaves the flight where it is: it will land.
        self._flight.wait()
        flight, self._flight = self._flight, None
        try:
            result = flight.result()
        except Exception:
            self._scheduler.roll_back(flight.step)
            raise
        landed = self._scheduler.commit(flight.step, result.tokens)
        if landed.broken_blocks:
            self._runner.zero_blocks(landed.broken_blocks)
        self._num_steps += 1
        self._decode_tokens += len(landed.seqs)
        self._prefill_tokens += flight.step.num_prefill_tokens
        self._times.step.add(flight.age_ms)
        self._times.forward.add(result.forward_ms)
        self._times.sample.add(result.sample_ms)
        return landed

    def _launch(self) -> None:
        """Schedule the next step and submit it."""
        with self._times.schedule:
            step = self._scheduler.schedule()
        if step is not None:
            with self._times.prepare:
                self._flight = Flight(self._runner, step, self._scheduler.plan(step))

    def _hand_out(self, landed: Landed | None) -> list[StepOutput]:
        """What each choice gained; nothing for those that are gone since their step was launched."""
        ended, self._ended_by_replay = self._ended_by_replay, []
        outputs = [self._output(choice, ()) for choice in ended]
        if landed is None:
            return outputs
        with self._times.output:
            for seq, token in zip(landed.seqs, landed.token_ids, strict=True):
                choice = self._live.get(seq)
                if choice is not None:
                    outputs.append(self._advance(choice, token))
        return outputs

    def _advance(self, choice: LiveChoice, token: int) -> StepOutput:
        if token == FAILED_TOKEN:
            choice.output.fail()
            return self._output(choice, ())
        choice.output.push(token)
        choice.request.completion_tokens += 1
        if choice.output.finish_reason is not None and choice.seq.row >= 0:
            self._scheduler.remove(choice.seq)  # its text ends it, which only shows here
        return self._output(choice, (token,))

    def _output(self, choice: LiveChoice, token_ids: tuple[int, ...]) -> StepOutput:
        text = choice.output.take_text()
        if choice.owed:
            text, choice.owed = choice.owed + text, ""
        finish_reason = choice.output.finish_reason
        return StepOutput(
            request_id=choice.request.request_id,
            choice=choice.seq.choice,
            position=choice.output.num_tokens - len(token_ids),
            token_ids=token_ids,
            text=text,
            finish_reason=finish_reason,
            usage=self._end_choice(choice) if finish_reason is not None else None,
        )

    def _end_choice(self, choice: LiveChoice) -> Usage | None:
        """Close a choice; the request's usage when it was the last one."""
        request = choice.request
        self._live.pop(choice.seq, None)
        del request.live[choice.seq.choice]
        if request.live:
            return None
        del self._requests[request.request_id]
        usage = self._finished_usage[request.request_id] = request.usage()
        return usage


def _no_progress(stage: str, fraction: float) -> None:
    """Nobody wants to know."""
