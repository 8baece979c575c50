"""The engine of an encoder: whole texts in, rows of numbers out, one step at a time."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.contract.adapters import AdapterRef
from penstock.contract.errors import ConflictError, JobFailedError, RequestError, UnsupportedKindError
from penstock.contract.job import SamplingParams
from penstock.contract.output import Usage
from penstock.contract.priority import NUM_LEVELS
from penstock.contract.tasks import Classify, Embed, Pooling, Score
from penstock.gpu_node.engine.config import EngineConfig, ModelOrConfig
from penstock.gpu_node.engine.encoder.encoding import TextEncoder
from penstock.gpu_node.engine.encoder.entities import entities_of
from penstock.gpu_node.engine.encoder.steps import LiveTexts, TextSpan, TextSteps, batch_of, halves_of
from penstock.gpu_node.engine.records import EngineRequest, EngineStats, Prepared, StepOutput
from penstock.gpu_node.engine.text.tokenizer import Tokenizer
from penstock.gpu_node.engine.texts import EncoderTask, PackedTexts, TextResults
from penstock.gpu_node.engine.timings import StepTimings
from penstock.gpu_node.model.protocol import NO_RANKS, RankStats
from penstock.gpu_node.model.text_protocol import LoadedEncoder, TextHandle, TextResult
from penstock.runtime.process_memory import resident_bytes

log = logging.getLogger(__package__)

STEPS_HELD = 4
"""Steps' worth of tokens that a node takes from the queue at once."""
MIN_SEQUENCES = 256
"""Requests that it takes at once, where `max_num_seqs` is not higher: many have one short text."""
_BLOCK = 16
"""Tokens that stand for a KV block in statistics."""


def load_encoder_of(config: EngineConfig, source: Any, progress: Callable[[str, float], None]) -> LoadedEncoder:
    """Load the encoder of some files (ModelSource). Raises ConfigError."""
    # As `engine.served_model.load` does: torch reads these when it is imported for the first time.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from penstock.gpu_node.model.encoders.load import load_encoder

    # On a thread that ends: torch keeps an OpenMP team for every living thread that computed.
    with ThreadPoolExecutor(1, "penstock-load") as loader:
        return loader.submit(load_encoder, source, config, progress).result()


class EncoderEngine:
    """Computes whole texts in packed steps. One thread owns it; other threads may use `texts` and the tokenizer."""

    def __init__(
        self, model: ModelOrConfig, *, progress: Callable[[str, float], None] | None = None, **settings: Any
    ) -> None:
        """Load an encoder: a folder or a hub id with fields of `EngineConfig`, or that config. Raises ConfigError."""
        config = EngineConfig.of(model, settings)
        tell = progress or (lambda stage, fraction: None)
        loaded = self._model = load_encoder_of(config, encoder_source(config, tell), tell)
        self._name = config.model
        self.tokenizer = Tokenizer(loaded.folder, vocab_size=loaded.vocab_size, generates=False)
        """The model's tokenizer; safe to call from any thread."""
        self.texts = TextEncoder(loaded, self.tokenizer.backend)
        """How texts are tokenized; safe to call from any thread."""
        self.pairs: None = None
        """It scores pairs with a head of its own, if it does."""
        self.max_model_len = loaded.max_tokens
        """Most tokens of a text, with the marks around it."""
        self.max_num_seqs = max(config.max_num_seqs, MIN_SEQUENCES)
        """Requests that are taken at once."""
        self.revision = loaded.revision
        """Identifies weights, tokenizer, head and dtype."""
        # Keyed by id: name of a setting; it is always empty.
        self.sampling_defaults: dict[str, int | float] = {}
        """None: an encoder samples nothing."""
        self._steps = TextSteps(config)
        self.num_kv_tokens = max(STEPS_HELD * self._steps.max_tokens, loaded.max_tokens)
        """Tokens of the texts that are taken at once. There is no KV cache."""
        self.window_tokens = None
        # Keyed by id: id of a request.
        self._live: dict[str, LiveTexts] = {}
        self._in_flight: tuple[list[TextSpan], TextHandle, float] | None = None
        self._ended: list[StepOutput] = []
        self._timings = StepTimings()
        self._kind_s = {"foreground": 0.0, "background": 0.0}
        self._level_s = [0.0] * NUM_LEVELS
        self._num_named = 0

    def __repr__(self) -> str:
        return f"<EncoderEngine {self._name} max_model_len={self.max_model_len}>"

    def capabilities(self) -> tuple[str, ...]:
        """Return what the model is good for, as `PoolRecord.capabilities` says."""
        return self._model.head.kinds

    @property
    def leaves_core_free(self) -> bool:
        """Whether steps leave at least one of the node's cores to other work."""
        return self._model.runner.placement.leaves_core_free

    @property
    def background_due(self) -> bool:
        """Whether background work is below its share of the engine's time; safe on any thread."""
        return self._steps.background_due

    def has_foreground(self) -> bool:
        """Return whether a caller waits for any of its texts."""
        return any(not live.request.background for live in self._live.values())

    def note_foreground_beside(self) -> None:
        """Note that another node on these cores has foreground work, so that steps of background work stay short."""
        self._steps.note_foreground()

    def note_queued_background(self, is_queued: bool) -> None:
        """Note whether background work waits outside the engine; safe on any thread."""
        self._steps.is_background_queued = is_queued

    def embed(
        self,
        texts: Sequence[str | Sequence[int]],
        *,
        pooling: Pooling | None = None,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> NDArray[np.float32]:
        """Return the embeddings of texts, [num_texts, dimensions], computed as one batch; see `Embed`.

        Raises RequestError beside other requests, JobFailedError if the model computes NaN or infinity for a text.
        """
        options = {"pooling": pooling, "dimensions": dimensions, "prompt_name": prompt_name}
        return self._run(texts, truncate_prompt_tokens, lambda **given: Embed(**options, **given))

    def classify(
        self, texts: Sequence[str | Sequence[int]], *, raw: bool = False, truncate_prompt_tokens: int | None = None
    ) -> NDArray[np.float32]:
        """Return the score of each label for each text, [num_texts, num_labels]; see `Classify` and `embed`."""
        return self._run(texts, truncate_prompt_tokens, lambda **given: Classify(raw=raw, **given))

    def score(
        self, query: str, texts: Sequence[str], *, raw: bool | None = None, truncate_prompt_tokens: int | None = None
    ) -> NDArray[np.float32]:
        """Return how well each text fits the query, [num_texts], by a model of pairs; see `Score` and `embed`."""
        return self._run(texts, truncate_prompt_tokens, lambda **given: Score(raw=raw, **given), query)[:, 0]

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the model's labels; empty for a model that embeds."""
        return self._model.head.labels

    def adapters(self) -> dict[str, str]:
        """Return nothing: encoders have no adapters."""
        return {}

    def prepare(
        self, params: SamplingParams, adapter: AdapterRef | None = None, *, tenant: str = "default"
    ) -> Prepared | None:
        """Refuse what an encoder does not have. Raises RequestError."""
        if adapter is not None:
            raise RequestError(f"this model is an encoder and has no adapter {adapter.name}", param="adapter")
        return None

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises UnsupportedKindError for one without texts, ConflictError for an id that is known."""
        if request.texts is None:
            raise UnsupportedKindError("this model is an encoder and generates no text")
        if request.request_id in self._live:
            raise ConflictError(f"request {request.request_id} is already in the engine")
        live = self._live[request.request_id] = LiveTexts(request, request.texts, time.monotonic() * 1e3)
        self._steps.add(live)

    def abort(self, request_id: str) -> None:
        """Drop a request; does nothing for an unknown id."""
        if (live := self._live.pop(request_id, None)) is not None:
            self._steps.drop(live)

    def bind_thread(self) -> None:
        """Do nothing: steps run on a thread of the runner."""

    @property
    def num_requests(self) -> int:
        """Number of requests that have not ended."""
        return len(self._live)

    def has_work(self) -> bool:
        """Return whether `step` has anything to do."""
        return bool(self._steps or self._in_flight or self._ended)

    @property
    def ranks(self) -> RankStats:
        """One process computes the model."""
        return NO_RANKS

    def wait(self) -> None:
        """Block until `step` would not wait."""
        if self._in_flight is not None:
            try:
                self._in_flight[1].result()
            except Exception:
                return  # The step raises it.

    def step(self) -> list[StepOutput]:
        """Complete the step in flight, start the next one, and return the outputs of requests that are complete.

        An error of a step propagates. Its texts are then computed in halves, until a single one fails alone: its
        request ends with an error, and others are not affected.
        """
        completed, self._in_flight = self._in_flight, None
        result = None if completed is None else self._result_of(*completed)
        spans = self._steps.next_step()
        if spans:
            with self._timings.prepare:
                handle = self._model.runner.submit(batch_of(spans))
            begun_s = time.perf_counter()
            for span in spans:
                span.live.begun_s = span.live.begun_s or begun_s
            self._in_flight = spans, handle, begun_s
        # The runner computes the next step meanwhile.
        with self._timings.output:
            if completed is None or result is None:
                return self._outputs_of([])
            self._keep_rows(completed[0], result)
            return self._outputs_of(completed[0])

    def requests_in_flight(self) -> set[str]:
        """Return the ids of the current step's requests; safe on any thread."""
        in_flight = self._in_flight
        return set() if in_flight is None else {span.live.job_id for span in in_flight[0]}

    def num_preemptions(self, request_id: str) -> int:
        """Return 0: nothing is preempted."""
        return 0

    def memory_trail(self) -> list[str]:
        """Return nothing: there is no KV cache whose use would have a history."""
        return []

    def stats(self) -> EngineStats:
        """Return statistics for the pressure record. The tokens of its requests stand for those of a KV cache."""
        held = sum(len(live.texts) for live in self._live.values())
        total = self.num_kv_tokens // _BLOCK
        return EngineStats(
            block_size=_BLOCK,
            kv_blocks_total=total,
            kv_blocks_free=max(0, total - -(-held // _BLOCK)),
            kv_tokens_used=held,
            num_running=len(self._live) - self._steps.num_waiting,
            num_waiting=self._steps.num_waiting,
            max_step_tokens=self._steps.max_tokens,
            process_bytes=resident_bytes(),
            kind_seconds=dict(self._kind_s),
            level_seconds=tuple(self._level_s),
            background_due=self._steps.background_due,
            arithmetic=self._model.arithmetic,
            weight_bytes=self._model.runner.placement.weight_bytes,
            **self._timings.stats(),
        )

    def _result_of(self, spans: list[TextSpan], handle: TextHandle, begun_s: float) -> TextResult:
        """Wait for a step, and return its result. If it failed, plan its texts again in halves, and raise."""
        try:
            result = handle.result()
        except Exception as error:
            self._timings.note_failed(error)
            halves = halves_of(spans)
            if len(halves) == 1:
                self._fail(spans[0], error)
            else:
                for half in reversed(halves):
                    self._steps.retry(half)
            raise
        self._note(spans, time.perf_counter() - begun_s, result.forward_ms)
        return result

    def _keep_rows(self, spans: list[TextSpan], result: TextResult) -> None:
        """Keep what the head makes of a step's result."""
        at = 0
        for span in spans:
            lengths = span.lengths
            num_rows = len(lengths) if self._model.head.row_kind == "labels" else span.num_tokens
            rows = self._model.head.rows(result.hidden[at : at + num_rows], lengths, span.live.texts.task)
            at += num_rows
            of_tokens = self._model.head.row_kind == "token_labels"
            parts = np.split(rows, np.cumsum(lengths)[:-1]) if of_tokens else rows
            span.live.rows.update(zip(range(span.first, span.end), parts, strict=True))

    def _note(self, spans: list[TextSpan], took_s: float, forward_ms: float) -> None:
        """Count a computed step."""
        timings, num_tokens = self._timings, sum(span.num_tokens for span in spans)
        timings.steps += 1
        timings.prefill_tokens += num_tokens
        timings.step.add(took_s * 1e3)
        timings.forward.add(forward_ms)
        timings.step_seconds.note(took_s)
        timings.batch_sequences.note(sum(span.end - span.first for span in spans))
        timings.batch_tokens.note(num_tokens)
        for span in spans:
            part_s = took_s * span.num_tokens / num_tokens
            self._kind_s["background" if span.live.request.background else "foreground"] += part_s
            self._level_s[span.live.request.level] += part_s
        self._steps.note_step(spans, took_s)

    def _fail(self, span: TextSpan, error: Exception) -> None:
        """End the request of a text that makes steps fail."""
        live = span.live
        if self._live.pop(live.job_id, None) is None:
            return
        self._steps.drop(live)
        log.error("a text makes steps fail", extra={"request": live.job_id, "reason": repr(error)})
        number = live.texts.task.index_of(span.first)
        self._ended.append(_failed(live, number, "the model cannot compute this text"))

    def _outputs_of(self, spans: list[TextSpan]) -> list[StepOutput]:
        outputs, self._ended = self._ended, []
        for live in dict.fromkeys(span.live for span in spans):
            if live.is_complete and self._live.pop(live.job_id, None) is not None:
                outputs.append(self._output(live))
        return outputs

    def _output(self, live: LiveTexts) -> StepOutput:
        """Return the rows of a request, or the error of the first text for which the model computed NaN."""
        texts, head = live.texts, self._model.head
        rows = [live.rows[at] for at in range(texts.num_texts)]
        for at, row in enumerate(rows):
            if not np.isfinite(row).all():
                return _failed(live, texts.task.index_of(at), "the model computed NaN or infinity for this text")
        num_tokens = tuple(np.diff(texts.starts).tolist())
        if head.row_kind == "token_labels":
            found = zip(rows, texts.offsets, texts.texts, strict=True)
            parts = (entities_of(row, head.labels, offsets, text) for row, offsets, text in found)
            entities = f"[{','.join(parts)}]"
            results = TextResults(texts.task.kind, b"", num_tokens, head.labels, entities)
        else:
            labels = head.labels if texts.task.kind == "classify" else ()
            results = TextResults(texts.task.kind, np.stack(rows).astype("<f4").tobytes(), num_tokens, labels)
        usage, held_ms = Usage(len(texts), 0, 0), (time.perf_counter() - live.begun_s) * 1e3
        return StepOutput(live.job_id, 0, 0, (), "", "stop", usage, len(texts) * held_ms, texts=results)

    def _run(
        self,
        texts: Sequence[str | Sequence[int]],
        truncate_prompt_tokens: int | None,
        task_of: Callable[..., EncoderTask],
        query: str | None = None,
    ) -> NDArray[np.float32]:
        """Compute texts as one batch, or with a query pairs of it and each text. Raises what `embed` raises."""
        if self._live:
            raise RequestError("a batch needs an engine without other requests")
        if isinstance(texts, str) or not texts:
            raise RequestError("texts must be a list of at least one text", param="texts")

        def packed_of(at: int) -> PackedTexts:
            pair = {} if query is None else {"texts": (texts[at],)}
            task = task_of(first=at, truncate_prompt_tokens=truncate_prompt_tokens, **pair).within(self.max_model_len)
            prompt = texts[at] if query is None else query
            return self.texts.encode(task, prompt if isinstance(prompt, str) else list(prompt))

        params, next_text, found = SamplingParams(), 0, dict[str, StepOutput]()
        try:
            while next_text < len(texts) or self.has_work():
                # Texts are tokenized while a step computes others.
                held = sum(len(live.texts) for live in self._live.values())
                while next_text < len(texts) and held < self.num_kv_tokens:
                    packed = packed_of(next_text)
                    self.add(EngineRequest(str(next_text), (), params, seed=0, texts=packed))
                    held += len(packed)
                    next_text += 1
                found.update((output.request_id, output) for output in self.step())
        finally:
            for request_id in tuple(self._live):
                self.abort(request_id)
        rows = []
        for at in range(len(texts)):
            output = found[str(at)]
            if output.texts is None:
                raise output.error or JobFailedError(f"the model failed at text {at}", code="model_error")
            rows.append(np.frombuffer(output.texts.rows, "<f4"))
        return np.stack(rows)


def encoder_source(config: EngineConfig, progress: Callable[[str, float], None]) -> Any:
    """Return the files of the encoder that a config names. Raises ConfigError for a model that generates text."""
    from penstock.contract.errors import ConfigError
    from penstock.gpu_node.model.architecture.encoders import EncoderFoundError
    from penstock.gpu_node.model.loading.load import find_model

    try:
        found = find_model(config.model, config, progress, revision=config.revision)
    except EncoderFoundError as error:
        return error.source
    raise ConfigError(f"{config.model} generates text; Engine computes it, not EncoderEngine: {found.source.folder}")


def _failed(live: LiveTexts, number: int, message: str) -> StepOutput:
    """Return the output of a request that a text ends. number: that of the text among those of its caller."""
    name = f"prompt[{number}]"
    error = JobFailedError(f"{name}: {message}", code="model_error", param=name)
    return StepOutput(live.job_id, 0, 0, (), "", "error", Usage(len(live.texts), 0, 0), error=error)
