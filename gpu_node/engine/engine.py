"""The engine: requests in, tokens and text out, one step at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from typing import Any, Unpack, cast

from penstock.contract.adapters import AdapterRef
from penstock.contract.errors import ConflictError, NotFoundError, PromptTooLongError
from penstock.contract.job import SamplingParams
from penstock.contract.output import TokenLogprobs, Usage
from penstock.contract.tasks import Embed, Embedding, Pooling
from penstock.gpu_node.engine.config import EngineConfig, ModelOrConfig
from penstock.gpu_node.engine.kv_cache.manager import KvCacheManager
from penstock.gpu_node.engine.offline import (
    Adapters,
    Params,
    Prompt,
    RequestOptions,
    embed_requests,
    embeddings_of,
    generations_of,
    held_interrupts,
    one_request,
    run_batch,
    spread,
    step_of_any,
)
from penstock.gpu_node.engine.policy.by_policy import new_scheduling_policy, note_held
from penstock.gpu_node.engine.policy.policy import AdapterSlots
from penstock.gpu_node.engine.prompt_tokens import logprobs_of, make_records, note_prompt_tokens, with_prompt_tokens
from penstock.gpu_node.engine.records import (
    EngineRequest,
    EngineStats,
    Generation,
    Prepared,
    RequestTimings,
    StepLostError,
    StepOutput,
)
from penstock.gpu_node.engine.request import LiveChoice, LiveRequest
from penstock.gpu_node.engine.scheduler.budget import StepLimits
from penstock.gpu_node.engine.scheduler.faults import is_slow
from penstock.gpu_node.engine.scheduler.memory_trace import MemoryTrace
from penstock.gpu_node.engine.scheduler.running import StepOutcome
from penstock.gpu_node.engine.scheduler.scheduler import LearnedTimes, Scheduler
from penstock.gpu_node.engine.search.searches import Searches
from penstock.gpu_node.engine.sequence import Sequence as Choice
from penstock.gpu_node.engine.sequence import salted_root
from penstock.gpu_node.engine.served_model import ServedModel, check_request
from penstock.gpu_node.engine.speculative.drafts import speculation_of
from penstock.gpu_node.engine.steps import InFlightSteps, Step
from penstock.gpu_node.engine.structured.guide import late_rows
from penstock.gpu_node.engine.timings import EngineProfiler, PrefillReports, RequestTimers, StepTimings, engine_stats
from penstock.gpu_node.model.protocol import (
    FAILED_TOKEN,
    NO_RANKS,
    Logprobs,
    RanksLostError,
    RankStats,
    RecoverableRunner,
    StepPlan,
    StepResult,
)

log = logging.getLogger(__package__)


class Engine:
    """Continuous batching over one model. One thread owns it; other threads may use `stats` and the tokenizer."""

    def __init__(
        self, model: ModelOrConfig, *, progress: Callable[[str, float], None] | None = None, **settings: Any
    ) -> None:
        """Load a model: a folder, a `.gguf` file or a hub id, with fields of `EngineConfig`; or an EngineConfig.

        `progress` is called with the loading stage and its finished fraction. Raises ConfigError for a wrong setting,
        and for a model that is missing, unsupported or too large for the KV cache it would need.
        """
        config = EngineConfig.of(model, settings)
        served = self._served = ServedModel(config, progress or (lambda stage, fraction: None))
        config = served.config
        self.tokenizer, self.texts, self.pairs = served.tokenizer, None, served.pairs
        """The tokenizer, safe on any thread; no texts that are computed whole, as an encoder has; scores of pairs."""
        self.max_model_len = served.limits.max_model_len
        """Most tokens that prompt and output of one choice may have together."""
        self.max_num_seqs = config.max_num_seqs
        """Most sequences in a step: as configured, or fewer if the states of so many do not fit."""
        self.vocab_size = served.limits.vocab_size
        """Size of the model's output; token ids are below it."""
        self.revision = served.model.revision
        """Identifies weights, tokenizer and dtype. Engines of equal revision can continue each other's choices."""
        self.sampling_defaults = served.sampling_defaults
        """The sampling that the model recommends, by the names of `SamplingParams`."""
        self.capabilities = served.capabilities
        """Returns what the model is good for, as `PoolRecord.capabilities` says. May compile the chat template."""
        self._guides = served.guides
        self._runner = served.model.runner
        self._memory = KvCacheManager.of(self._runner, config)
        self.num_kv_tokens = self._memory.device.num_total * config.block_size
        """Capacity of the KV cache in tokens, without swap space."""
        self.window_tokens = self._memory.window_tokens(config.block_size)
        self._block_size, self._stall_after_s = config.block_size, config.stall_after_s
        self._tenants_share_prefixes = config.prefix_cache_salt == "pool"
        drafts = speculation_of(config, self._runner)
        self._times = LearnedTimes(config.preemption, self._runner.cache_sizes.block_bytes, drafts.note_decoding)
        limits = StepLimits.of(config, self.max_model_len)
        self._adapter_slots = AdapterSlots(config.num_adapter_slots)
        self._policy = new_scheduling_policy(config, self._adapter_slots)
        self._scheduler = Scheduler(self._memory, limits, self._times, policy=self._policy, drafts_of=drafts.drafts)
        self.has_foreground = self._scheduler.background.has_foreground
        self.note_foreground_beside = self._scheduler.background.note_foreground
        self._memory_trace = MemoryTrace(self._scheduler, self._memory)
        self._requests: dict[str, LiveRequest] = {}  # Keyed by id: id of a request.
        self._finished_usage: dict[str, Usage] = {}  # Keyed by id: id of a request.
        self._live: dict[Choice, LiveChoice] = {}
        self._ended_early: list[LiveChoice] = []
        self._in_flight, self._prefill_reports = InFlightSteps(), PrefillReports(self._live)
        self._timers, self._timings, self._num_named = RequestTimers(), StepTimings(), 0
        self._searches = Searches(self._scheduler, self.tokenizer, config.block_size)
        self._logprobs: Logprobs | None = None
        self._last_step: tuple[list[Choice], float] = [], 0.0
        self._launch_error: Exception | None = None
        recovers = isinstance(self._runner, RecoverableRunner) and self._runner.ranks.num_ranks > 1
        self._ranked = cast("RecoverableRunner", self._runner) if recovers else None
        self.profiler = EngineProfiler(self._timings, self._runner)

    def __repr__(self) -> str:
        return f"<Engine {self._served.config.model} max_model_len={self.max_model_len}>"

    def generate(
        self, prompts: Prompt | Items[Prompt], params: Params = None, *, adapters: Adapters = None
    ) -> list[Generation]:
        """Run prompts (texts, token ids or chats) to their end as one batch; results have the order of the prompts.

        A single prompt counts as a list of one. `params` and `adapters` are one for all or one for each. Raises
        RequestError beside other requests.
        """
        batch = spread(prompts, params, adapters, self.tokenizer)
        return generations_of(batch, run_batch(self, batch, "generate"))

    def add_request(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> str:
        """Queue a prompt (text, token ids or chat) and return the request's id. `step` and `stream` give its outputs.

        Raises RequestError naming the field, ConflictError for an id that is already queued.
        """
        if "request_id" not in options:
            self._num_named += 1
            options["request_id"] = f"request-{self._num_named}"
        request = one_request(prompt, params, self.tokenizer, **options)
        self.add(request, is_timed=True)
        return request.request_id

    def stream(self) -> Iterator[StepOutput]:
        """Step until no request is left, and yield all outputs. Requests may be added and aborted meanwhile."""
        while self.has_work():
            with held_interrupts():
                outputs = step_of_any(self)
            yield from outputs

    def timings(self, request_id: str) -> RequestTimings:
        """Return where the time of a request of `add_request` went so far.

        The times of the last 1,024 ended requests are kept. Raises NotFoundError for any other request.
        """
        if (found := self._timers.timings(request_id)) is None:
            raise NotFoundError(f"the engine has no times of request {request_id}")
        return found

    def embed(
        self,
        prompts: Prompt | Items[Prompt],
        *,
        pooling: Pooling | None = None,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
        adapters: Adapters = None,
    ) -> list[Embedding]:
        """Return the embeddings of prompts (texts, token ids or chats), computed as one batch; see `Embed`.

        Raises RequestError beside other requests, JobFailedError if the model computes NaN or infinity for a prompt.
        """
        options = {"pooling": pooling, "dimensions": dimensions, "prompt_name": prompt_name}
        wanted = Embed(**options, truncate_prompt_tokens=truncate_prompt_tokens)
        batch = embed_requests(prompts, wanted.within(self.max_model_len), adapters, self.tokenizer)
        return embeddings_of(batch, run_batch(self, batch, "embed"))

    def adapters(self) -> dict[str, str]:
        """Return the names and digests of the adapters that requests may use now."""
        return self._served.model.adapters.digests()

    def prepare(
        self, params: SamplingParams, adapter: AdapterRef | None = None, *, tenant: str = "default"
    ) -> Prepared:
        """Do the slow part of `add` in advance, on any thread. The result becomes the `prepared` of an EngineRequest.

        Raises RequestError for a request that could never run.
        """
        return self._served.prepare(params, adapter, tenant=tenant)

    def add(self, request: EngineRequest, *, is_timed: bool = False) -> None:
        """Queue a request; its `n` choices share the prompt's blocks. `timings` knows it if `is_timed`.

        Raises RequestError or PromptTooLongError naming the field, ConflictError for an id that is already queued.
        """
        if request.request_id in self._requests:
            raise ConflictError(f"request {request.request_id} is already in the engine")
        try:
            check_request(request, self._served.limits)
        except PromptTooLongError:
            self._memory_trace.refused()
            raise
        prepared = request.prepared or self.prepare(request.params, request.adapter, tenant=request.tenant)
        # A caller's salt divides the prefixes of its tenant, and joins no tenants, whatever the setting is.
        salt = request.params.cache_salt
        tenant = None if self._tenants_share_prefixes and salt is None else request.tenant
        root = salted_root(tenant, salt, prepared.adapter_digest)
        live = LiveRequest(request, root, prepared)
        live.open(self._served.limits, self.tokenizer, self._guides)
        if is_timed:
            self._timers.add(request.request_id)
        self._enqueue(live)

    def abort(self, request_id: str) -> None:
        """Drop a request and free its blocks; does nothing for an unknown id."""
        self._timers.end(request_id)
        if self._searches.is_active:
            self._searches.drop(request_id)
        if (request := self._requests.pop(request_id, None)) is None:
            return
        self._ended_early = [ended for ended in self._ended_early if ended.request is not request]
        for choice in request.live.values():
            if self._live.pop(choice.seq, None) is not None:
                self._scheduler.remove(choice.seq)

    def bind_thread(self) -> None:
        """Declare that the calling thread only steps the engine, so that the runner may pin it to a core."""
        self._runner.bind_thread()

    @property
    def num_requests(self) -> int:
        """Number of requests that have not ended."""
        return len(self._requests)

    def has_work(self) -> bool:
        """Return whether `step` has anything to do."""
        has_requests = bool(self._requests or self._searches.is_active or self._in_flight)
        return has_requests or (self._ranked is not None and self._ranked.is_lost)

    @property
    def ranks(self) -> RankStats:
        """The ranks that compute the model together. Any thread may read it."""
        return NO_RANKS if self._ranked is None else self._ranked.ranks

    def wait(self) -> None:
        """Block until `step` would not wait. The step that it then submits includes requests added meanwhile."""
        self._in_flight.wait()

    def step(self) -> list[StepOutput]:
        """Complete the oldest step in flight, launch the next one, and return the outputs of the completed step.

        The outputs are made while the next step runs, so a stop string is found one step late and the extra token is
        dropped. Where the runner takes steps ahead, end tokens are found one step late as well.

        Exceptions of the runner and the scheduler propagate; the requests may be stepped again or aborted. If steps
        keep failing because of one request while other steps succeed, that request ends with an error. After
        StepLostError, the next call starts the runner's ranks again, and all requests continue.
        """
        if (error := self._launch_error) is not None:
            self._launch_error = None
            raise error
        if self._ranked is not None and self._ranked.is_lost and not self._in_flight:
            self._scheduler.lose_blocks()
            self._ranked.recover()
            return []  # Requests that were aborted meanwhile must not be in the next step.
        self._finished_usage.clear()
        outcome = self._complete_step()
        try:
            self._launch()
        except Exception as error:
            self._launch_error = error  # The next call raises it, so that the outputs of this one are not lost.
        self._memory_trace.watch()
        outputs = self._outputs_of(outcome)
        if self._searches.is_active:
            outputs = self._searches.release(outputs)
        if self._timers.running:
            self._timers.note_outputs(outputs)
        return outputs

    def usage(self, request_id: str) -> Usage:
        """Return a request's token usage, until the `step` after the one that finished it. Raises NotFoundError."""
        request = self._requests.get(request_id)
        usage = request.usage() if request is not None else self._finished_usage.get(request_id)
        if usage is None:
            raise NotFoundError(f"request {request_id} is not in the engine")
        return usage

    def requests_in_flight(self) -> set[str]:
        """Return the ids of requests in submitted steps. Any thread may call it while the engine hangs in a step."""
        return {request_id for step in self._in_flight.steps for request_id in self._requests_of(step)}

    def num_preemptions(self, request_id: str) -> int:
        """Return how often the open choices of a request were preempted. Any thread may call it."""
        request = self._requests.get(request_id)
        return 0 if request is None else sum(choice.seq.num_preemptions for choice in list(request.live.values()))

    @property
    def background_due(self) -> bool:
        """Whether background work is below its share of the engine's time. Any thread may read it."""
        return self._scheduler.background.is_due

    def note_queued_background(self, is_queued: bool) -> None:
        """Note whether background work waits outside the engine. Any thread may call it."""
        self._scheduler.background.is_queued = is_queued

    def stats(self) -> EngineStats:
        """Return a snapshot of memory, queues and counters."""
        counts, timings = self._guides.counts, self._timings
        sizes = self._served.model, self._block_size
        return engine_stats(self._memory, self._scheduler, timings, counts, *sizes, self._searches.shared)

    def memory_trail(self) -> list[str]:
        """Return the latest memory records as text, one line each, the oldest first."""
        return self._memory_trace.lines()

    def check_integrity(self) -> None:
        """Raise InvariantError unless scheduler and memory are consistent. O(blocks), for tests and idle times."""
        self._scheduler.check_integrity()

    @property
    def leaves_core_free(self) -> bool:
        """Whether steps leave at least one of the process's cores to other work."""
        return self._served.model.runner.placement.leaves_core_free

    def _enqueue(self, request: LiveRequest) -> None:
        if not request.live:
            self._finished_usage[request.asked.request_id] = request.usage()
            return
        self._requests[request.asked.request_id] = request
        choices = request.live.values()
        self._ended_early += [choice for choice in choices if choice.output.finish_reason is not None]
        still_open = {choice.seq: choice for choice in choices if choice.output.finish_reason is None}
        self._live |= still_open
        if request.asked.reports_prefill and request.first is not None:
            self._prefill_reports.watch(request.first)
        if request.asked.params.withholds_output:
            self._searches.add(request)
        for seq in still_open:
            self._policy.added(seq)
        if still_open:
            guides = {seq: choice.guide for seq, choice in still_open.items() if choice.guide is not None}
            self._scheduler.add(*still_open, guides=guides)

    def _complete_step(self) -> StepOutcome | None:
        """Wait for the oldest step in flight and commit its tokens."""
        if not self._in_flight:
            return None
        completed = self._in_flight.complete()
        try:
            result = completed.result()
        except RanksLostError as error:
            self._timings.note_failed(error)
            raise StepLostError(self._lose(completed.step)) from error
        except Exception as error:
            self._timings.note_failed(error)
            self._memory_trace.failed(error)
            is_lack = isinstance(error, MemoryError)
            self._fail(self._scheduler.roll_back(completed.step, for_memory=is_lack, has_begun=completed.has_begun))
            raise
        self._last_step = completed.step.seqs, completed.age_ms
        late, was_slow = late_rows(completed.plan.sampling.masks), self._is_slow(completed.step, result)
        if self._searches.is_active:
            late = self._searches.take_samples(completed.step, result, late)
        outcome = self._scheduler.commit(completed.step, result.tokens, late, is_slow=was_slow)
        if self._searches.is_active:
            self._advance_searches()
        if outcome.faulty is not None:
            self._scheduler.remove(outcome.faulty)
            self._fail(outcome.faulty)
        self._logprobs = result.logprobs
        self._prefill_reports.note_completed(completed)
        if self._timers.running:
            self._timers.note_completed(completed)
        note_prompt_tokens(completed.step, completed.plan, result)
        self._timings.note_completed(completed, result, len(outcome.token_ids))
        num_scored = 0 if completed.plan.scored is None else len(completed.plan.scored.tokens)
        whole_ms = self._timings.schedule.last + completed.age_ms
        self._times.note_step(completed.step, result, num_scored=num_scored, whole_ms=whole_ms)
        self._scheduler.background.note_step(completed.step, result.forward_ms + result.sample_ms)
        return outcome

    def _lose(self, step: Step) -> frozenset[str]:
        """Record that a step was lost with all KV blocks. Return its requests; those that may be the cause fail."""
        self._scheduler.lose_blocks()
        lost = frozenset(self._requests_of(step))
        for request in [self._requests[request_id] for request_id in lost]:
            for seq in request.note_loss():
                self._scheduler.remove(seq)
                self._fail(seq)
        return lost

    def _is_slow(self, step: Step, result: StepResult) -> bool:
        """Return whether a step was slow, and log it if so."""
        took_s = (result.forward_ms + result.sample_ms + result.copy_ms) / 1000
        is_strict = step.num_prefill_tokens == 0 or self._scheduler.has_suspects
        if not is_slow(took_s, self._stall_after_s, is_strict=is_strict):
            return False
        log.warning("a step was slow", extra={"took_s": round(took_s, 1), "requests": sorted(self._requests_of(step))})
        return True

    def _requests_of(self, step: Step) -> set[str]:
        return {choice.request.asked.request_id for seq in step.seqs if (choice := self._live.get(seq)) is not None}

    def _fail(self, faulty: Choice | None) -> None:
        """End a choice that the scheduler has dropped, with an error in the next outputs."""
        if faulty is not None and (request := self._searches.fail(faulty)) is not None:
            self._close_search(request)
        if faulty is not None and (choice := self._live.pop(faulty, None)) is not None:
            choice.output.fail()
            self._ended_early.append(choice)

    def _advance_searches(self) -> None:
        """Choose the next tokens of beams, and close the searches that have ended."""
        before = self._searches.num_tokens
        for request in self._searches.advance():
            self._close_search(request)
        self._timings.decode_tokens += self._searches.num_tokens - before

    def _close_search(self, request: LiveRequest) -> None:
        """Close the choices of a search that has ended. Its outputs follow."""
        for choice in request.live.values():
            self._live.pop(choice.seq, None)
        request.live.clear()
        self._close(request)

    def _launch(self) -> None:
        """Schedule and submit the next step, and the steps that can be planned before it is done."""
        while self._in_flight.can_launch(self._runner):
            with self._timings.schedule:
                step = self._scheduler.schedule_ahead() if self._in_flight else self._scheduler.schedule()
            if step is None:
                return
            with self._timings.prepare:
                self._in_flight.launch(self._runner, step, self._plan)

    def _plan(self, step: Step) -> StepPlan:
        self._adapter_slots.load_pending(self._runner)
        plan = self._scheduler.plan(step)
        self._guides.write(plan.sampling.masks)
        return with_prompt_tokens(step, plan)

    def _outputs_of(self, outcome: StepOutcome | None) -> list[StepOutput]:
        """Return the outputs of a step; choices that were aborted since its launch get none."""
        ended, self._ended_early = self._ended_early, []
        outputs = [*self._prefill_reports.take(), *(self._output(choice, ()) for choice in ended)]
        if outcome is None:
            return outputs
        with self._timings.output:
            make_records(self._last_step[0], self.tokenizer)
            note_held(*self._last_step, self._block_size)
            for row, seq, token in zip(outcome.samples, outcome.seqs, outcome.token_ids, strict=True):
                if (choice := self._live.get(seq)) is not None:
                    outputs.append(self._advance(choice, token, row, has_left=seq in outcome.ended))
        self._timings.decode_tokens += sum(len(output.token_ids) for output in outputs)
        return outputs

    def _advance(self, choice: LiveChoice, token: int, row: int, *, has_left: bool) -> StepOutput:
        choice.push(token)
        if token == FAILED_TOKEN or choice.request.pooled is not None:
            return self._output(choice, ())
        if choice.output.finish_reason is not None and not has_left:
            self._scheduler.remove(choice.seq)  # a stop string ends it, and only the text shows that
        return self._output(choice, (token,), logprobs_of(choice.seq, self._logprobs, row, self.tokenizer))

    def _output(
        self, choice: LiveChoice, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...] = ()
    ) -> StepOutput:
        usage = self._end_choice(choice) if choice.output.finish_reason is not None else None
        prompt_logprobs = choice.request.take_prompt_logprobs(self.tokenizer)
        return choice.step_output(token_ids, logprobs, prompt_logprobs, usage)

    def _end_choice(self, choice: LiveChoice) -> Usage | None:
        """Close a choice. Return the request's usage when it was the last one."""
        request = choice.request
        if choice.output.finish_reason != "error":
            self._policy.ended(choice.seq, choice.output.num_tokens)
        self._live.pop(choice.seq, None)
        del request.live[choice.seq.choice]
        return None if request.live else self._close(request)

    def _close(self, request: LiveRequest) -> Usage:
        """Close a request whose choices have all ended. Return its usage."""
        del self._requests[(request_id := request.asked.request_id)]
        usage = self._finished_usage[request_id] = request.usage()
        return usage
