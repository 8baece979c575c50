"""One job that a node holds: what it took, what it generated, and what Redis has acknowledged. Pure data, no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from penstock.contract.errors import InvariantError, PenstockError
from penstock.contract.job import MAX_TOKENS_LIMIT, PREDICTED_OUTPUT_TOKENS, Request, SamplingParams
from penstock.contract.output import (
    PROMPT_TOKENS_PER_CHUNK,
    Choice,
    Chunk,
    FinishReason,
    Outcome,
    PrefillProgress,
    TokenLogprobs,
    Usage,
)
from penstock.contract.retries import OutputCheck, RetryCause
from penstock.gpu_node.engine.records import StepOutput
from penstock.gpu_node.jobs.drain import JobWork
from penstock.gpu_node.jobs.times import EndedJob, JobTimes
from penstock.queue import results, wire
from penstock.queue.broker.node import Emission, Successor, Taken, UsedTokens
from penstock.queue.results import encode_embedding, encode_text_rows
from penstock.queue.wire import NO_ROWS, Pack, RowParts, encode_chunk, encode_progress, joined, rows_of

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Link

    from penstock.gpu_node.engine import RankStats


@dataclass(slots=True)
class ChoiceText:
    """A choice's output so far. The `fresh_` fields hold what goes into the next chunk.

    `rows`: packed log-probabilities of the chunks so far, either one entry per token or none.
    """

    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    rows: list[RowParts] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    fresh_ids: list[int] = field(default_factory=list)
    fresh_texts: list[str] = field(default_factory=list)
    fresh_logprobs: list[TokenLogprobs] = field(default_factory=list)

    def extend(self, new: Chunk | StepOutput, *, is_fresh: bool = False) -> None:
        """Append logged output of an earlier node or the output of a step. `is_fresh`: it is in no chunk yet."""
        self.token_ids += new.token_ids
        self.texts.append(new.text)
        self.finish_reason = new.finish_reason
        if is_fresh:
            self.fresh_ids += new.token_ids
            self.fresh_texts.append(new.text)
            self.fresh_logprobs += new.logprobs

    def take_fresh(self, job_id: str, index: int, choice: int, usage: Usage | None) -> Chunk:
        """Return the next chunk, and clear the `fresh_` fields."""
        num_fresh = len(self.fresh_ids)
        chunk = Chunk(
            job_id,
            index,
            choice,
            len(self.token_ids) - num_fresh,
            tuple(self.fresh_ids),
            "".join(self.fresh_texts),
            self.finish_reason,
            usage,
            logprobs=tuple(self.fresh_logprobs),
        )
        self.fresh_ids.clear()
        self.fresh_texts.clear()
        self.fresh_logprobs.clear()
        return chunk


class SealedChunk(NamedTuple):
    """A packed chunk, and the packed log-probabilities in it. The job's log and its result share these bytes."""

    data: bytes
    rows: RowParts = NO_ROWS
    prompt_rows: RowParts = NO_ROWS


def seal(chunk: Chunk, pack: Pack = wire.pack) -> SealedChunk:
    """Pack a chunk."""
    if not (chunk.logprobs or chunk.prompt_logprobs):
        return SealedChunk(encode_chunk(chunk, pack))
    rows, prompt_rows = rows_of(chunk.logprobs, pack), rows_of(chunk.prompt_logprobs, pack)
    return SealedChunk(encode_chunk(chunk, pack, rows, prompt_rows), rows, prompt_rows)


class PromptRows:
    """A prompt's log-probabilities: the packed ones in chunks, and the ones that no chunk has yet.

    Those of a long prompt are packed in parts, because all at once would block the event loop for tens of milliseconds.
    """

    def __init__(self) -> None:
        self._packed: list[RowParts] = []
        self._num_packed = 0
        self._pending: list[TokenLogprobs] = []

    def take(self, entries: Sequence[TokenLogprobs]) -> None:
        """Add the whole prompt's entries. Those that an earlier node has logged are skipped."""
        self._pending += entries[self._num_packed + len(self._pending) :]

    @property
    def is_pending(self) -> bool:
        """Whether entries wait for a chunk."""
        return bool(self._pending)

    def next_chunk(self, job_id: str, index: int) -> Chunk:
        """Return the next chunk of log-probabilities, at most `PROMPT_TOKENS_PER_CHUNK` of them."""
        entries = tuple(self._pending[:PROMPT_TOKENS_PER_CHUNK])
        del self._pending[: len(entries)]
        return Chunk(job_id, index, position=self._num_packed, prompt_logprobs=entries)

    def note(self, rows: RowParts) -> None:
        """Keep a chunk's packed prompt log-probabilities, if it has any."""
        if rows.num_rows:
            self._packed.append(rows)
            self._num_packed += rows.num_rows

    @property
    def packed(self) -> RowParts:
        """The packed log-probabilities of all chunks."""
        return joined(self._packed)


_UNREAD_PARAMS = SamplingParams()


@dataclass(slots=True)
class JobTrace:
    """The part of a job's trace that a node keeps. Times are of this process's monotonic clock."""

    parent: Context
    """The context of the span that submitted the job."""
    trace_id: str
    """The trace id in hexadecimal, as logs show it."""
    operation: str
    """GenAI's name of what the job asks for."""
    queued_s: float
    """When it began to wait: at its submission, or when its last lease ended."""
    links: tuple[Link, ...] = ()
    """A link to the last lease's span, if the job had one."""
    has_begun: bool = False
    """Whether the spans before the first output are recorded."""
    ranks: RankStats | None = None
    """What the node's ranks had spent when it took the job."""


class HeldJob:
    """One job of this node. Its chunks are kept until it ends, because a Redis that lost writes asks for them again.

    0 <= num_acknowledged <= len(chunks): chunks from `num_acknowledged` on may be missing in the job's log in Redis.
    """

    def __init__(self, taken: Taken, taken_s: float = 0.0) -> None:
        """`taken_s`: when it was taken, on this process's monotonic clock."""
        self.taken = taken
        is_new = not (taken.num_chunks or taken.losses or taken.preemptions)
        self.times = JobTimes(taken_s - taken.waited_ms / 1000, taken_s, is_new=is_new)
        self.params = _UNREAD_PARAMS
        self.adapter = ""
        """The name of its adapter, or an empty string."""
        self.num_prompt_tokens = 0
        """0 until the prompt has been tokenized."""
        self.predicted_tokens = PREDICTED_OUTPUT_TOKENS
        """Predicted upper bound of each choice's output."""
        self.max_output_tokens = MAX_TOKENS_LIMIT
        """Largest possible output of each choice."""
        self.expires_s = inf
        """Deadline on this process's monotonic clock."""
        self.kv_token_ms = 0.0
        """KV-token-milliseconds of the choices that have ended, for the fair queue."""
        self.num_preemptions = 0
        """How often the engine preempted its choices that have ended here."""
        self.trace: JobTrace | None = None
        """What its spans need; None if its trace is not recorded."""
        self.num_acknowledged = 0
        self.is_in_engine = False
        self.outcome: Outcome | None = None
        """Set once this node has decided how the job ends; finish is then due in Redis."""
        self.usage: Usage | None = None
        self.output = b""
        """The packed output of its task."""
        self.error: PenstockError | None = None
        """Why a choice failed, when the request itself is the cause."""
        self.max_attempts: int | None = None
        """How often it may be tried, if its submission says so."""
        self.retry_on: tuple[RetryCause, ...] | None = None
        self.check: OutputCheck | None = None
        """What its output must match."""
        self.spent: tuple[int, int, int, int] | None = None
        """The tokens of the jobs whose place it has taken; they count in its result, and were counted to its tenant."""
        self.is_settling = False
        """Whether its output is being checked, or it returns to the queue after an error. It has no outcome then."""
        self.successor: Successor | None = None
        """The job that takes its place if it has another attempt."""
        self.work: JobWork | None = None
        """What it has computed here; None until the prompt has been tokenized, and for a task."""
        self.prefill: PrefillProgress | None = None
        """How far its prompt is computed, until the next emission carries that to its readers."""
        self._chunks: list[bytes] = []
        self._cuts: list[tuple[int, int, int]] = []
        self._choices: list[ChoiceText] = [ChoiceText()]
        self._prompt_rows = PromptRows()
        self._num_resumed = 0

    @property
    def job_id(self) -> str:
        """The job's public id."""
        return self.taken.job_id

    @property
    def is_task(self) -> bool:
        """Whether it needs no engine, and so no KV cache."""
        return not self.taken.num_sequences

    @property
    def has_failed_choice(self) -> bool:
        """Whether a choice ended because the model failed at it."""
        return any(c.finish_reason == "error" for c in self._choices)

    @property
    def num_sequences(self) -> int:
        """Number of choices that have not ended; 1 until the prompt has been tokenized. A task has none."""
        if self.is_task:
            return 0
        return sum(c.finish_reason is None for c in self._choices) if self.num_prompt_tokens else 1

    @property
    def expected_kv_tokens(self) -> int:
        """KV tokens that it is expected to use: its prompt, and for each open choice its actual or predicted output."""
        if self.is_task:
            return 0
        if not self.num_prompt_tokens:
            return self.taken.cost
        return self._kv_tokens_with(min(self.max_tokens, self.predicted_tokens))

    @property
    def expected_cost(self) -> int:
        """The job's cost in the queue if it is given back."""
        return self.taken.cost if self.is_task else self.expected_kv_tokens

    @property
    def max_kv_tokens(self) -> int:
        """KV tokens that it can use at most, if each open choice reaches its longest possible output."""
        return self._kv_tokens_with(self.max_output_tokens) if self.num_prompt_tokens else self.taken.cost

    def _kv_tokens_with(self, output_tokens: int) -> int:
        open_choices = [c for c in self._choices if c.finish_reason is None]
        return self.num_prompt_tokens + sum(max(output_tokens, len(c.token_ids)) for c in open_choices)

    @property
    def urgency(self) -> int:
        """The priority class that the job counted as when it was taken; 0 is the most urgent."""
        return self.taken.urgency

    @property
    def max_tokens(self) -> int:
        """Maximum number of output tokens of each choice."""
        return self.params.max_tokens or MAX_TOKENS_LIMIT

    @property
    def kv_token_ms_used(self) -> float | None:
        """KV-token-milliseconds to charge its tenant; None if it was cut short: the predicted charge then stays."""
        if self.is_task:
            return None  # It is charged for its work, which is not measured in KV tokens.
        return self.kv_token_ms if self.is_complete or not self.is_in_engine else None

    @property
    def num_output_tokens(self) -> int:
        """Output tokens of all choices so far."""
        return sum(len(c.token_ids) for c in self._choices)

    @property
    def num_new_tokens(self) -> int:
        """Output tokens of all choices that this node generated."""
        return self.num_output_tokens - self._num_resumed

    @property
    def open_lengths(self) -> list[int]:
        """Output lengths so far of the choices that have not ended, in tokens."""
        return [len(c.token_ids) for c in self._choices if c.finish_reason is None]

    @property
    def ended_lengths(self) -> list[int]:
        """Output lengths of the choices that ended by themselves, in tokens."""
        if self.output:
            return []
        return [len(c.token_ids) for c in self._choices if c.finish_reason in ("stop", "length")]

    @property
    def unsent_bytes(self) -> int:
        """Bytes of encoded chunks that Redis has not acknowledged."""
        if self.num_acknowledged == len(self._chunks):
            return 0
        return sum(map(len, self._chunks[self.num_acknowledged :]))

    @property
    def is_awaited(self) -> bool:
        """Whether a reader waits for its first token or its end."""
        return not self.num_acknowledged or self.outcome is not None

    @property
    def is_complete(self) -> bool:
        """Whether every choice has ended."""
        # Not all(): this runs for every token, and a generator costs three times as much.
        return None not in [c.finish_reason for c in self._choices]

    def note_terms(self, request: Request) -> None:
        """Note what the request says of further attempts and of the output."""
        self.max_attempts, self.retry_on = request.max_attempts, request.retry_on
        self.check, self.spent = request.check_output, request.spent

    def open(self, params: SamplingParams, logged: Sequence[Chunk] = (), sealed: Sequence[SealedChunk] = ()) -> None:
        """Create the job's choices, with what earlier nodes logged of them. `sealed`: the same chunks, packed."""
        self.params = params
        self._choices = [ChoiceText() for _ in range(params.n)]
        for chunk, one in zip(logged, sealed or map(seal, logged), strict=True):
            self._choices[chunk.choice].extend(chunk)
            if chunk.usage is not None:
                self.usage = chunk.usage if self.spent is None else chunk.usage.minus(self.spent)
            self._append(chunk, one)
        self.num_acknowledged = len(self._chunks)
        self._num_resumed = self.num_output_tokens

    def choice_so_far(self, choice: int) -> tuple[tuple[int, ...], str, FinishReason | None]:
        """Return (token ids, text, finish reason) of one choice."""
        c = self._choices[choice]
        return tuple(c.token_ids), "".join(c.texts), c.finish_reason

    def texts(self) -> list[str]:
        """Return the text of each choice."""
        return ["".join(choice.texts) for choice in self._choices]

    def add_tokens(self, output: StepOutput) -> None:
        """Add a choice's output of one step, and what the choice used if it ends. Sending makes it a chunk."""
        c = self._choices[output.choice]
        if output.position != len(c.token_ids):
            problem = f"token {output.position} after {len(c.token_ids)} tokens"
            raise InvariantError(f"{self.job_id} choice {output.choice}: {problem}")
        if output.embedding:
            # It goes into the result alone. Without a chunk, another node that takes over computes it again.
            self.output = encode_embedding(output.embedding, self.num_prompt_tokens)
        elif (found := output.texts) is not None:
            self.output = encode_text_rows(found.kind, found.rows, found.num_tokens, found.labels, found.entities)
        if output.finish_reason is not None:
            self.kv_token_ms += output.kv_token_ms
            self.num_preemptions += output.num_preemptions
            self.usage = output.usage or self.usage
        c.extend(output, is_fresh=not self.output)
        self.error = self.error or output.error
        self.report_prompt(output.prompt_logprobs)
        if len(c.fresh_logprobs) >= PROMPT_TOKENS_PER_CHUNK:
            # Happens while Redis is unavailable. One chunk with all of them would block a reader's event loop.
            self._seal(wire.pack)

    def report_prompt(self, entries: Sequence[TokenLogprobs]) -> None:
        """Report the prompt's tokens or their log-probabilities, except those that an earlier node has logged."""
        self._prompt_rows.take(entries)

    @property
    def has_unsealed_prompt(self) -> bool:
        """Whether prompt log-probabilities wait to be packed into a chunk."""
        return self._prompt_rows.is_pending

    def seal_part(self, pack: Pack = wire.pack) -> None:
        """Pack the next part of the prompt's log-probabilities into a chunk; takes about a millisecond."""
        chunk = self._with_prompt_tokens(self._prompt_rows.next_chunk(self.job_id, len(self._chunks)))
        self._append(chunk, seal(chunk, pack))

    def emission(self, pack: Pack = wire.pack, max_bytes: float = inf) -> Emission:
        """Return what Redis has not acknowledged. Steps that accumulated become one chunk per choice.

        If that is more than `max_bytes`, return as many chunks as fit, at least one.
        """
        self._seal(pack)
        chunks, num_bytes = list[bytes](), 0
        for chunk in self._chunks[self.num_acknowledged :]:
            num_bytes += len(chunk)
            if chunks and num_bytes > max_bytes:
                break
            chunks.append(chunk)
        prefill, self.prefill = self.prefill, None
        # If the call fails, this progress report is lost; the next one supersedes it.
        progress = b"" if prefill is None else encode_progress(self.job_id, prefill)
        return Emission(self.taken.job_id, self.taken.lease, self.num_acknowledged, tuple(chunks), progress)

    def whole_log(self) -> Emission | None:
        """Return all packed chunks from the first on; None if this node has not read what earlier nodes logged."""
        if not self._has_whole_log:
            return None
        return Emission(self.taken.job_id, self.taken.lease, 0, tuple(self._chunks))

    def is_rest(self, emission: Emission) -> bool:
        """Whether no packed chunk follows the emission's last one."""
        return emission.index + len(emission.chunks) >= len(self._chunks)

    def acknowledge(self, emission: Emission) -> None:
        """Note that Redis has stored this emission."""
        self.num_acknowledged = max(self.num_acknowledged, emission.index + len(emission.chunks))

    def send_again_from(self, index: int) -> None:
        """Mark the log from `index` on as lost, so that the next emission carries it again."""
        self.num_acknowledged = min(self.num_acknowledged, index)

    def result(self) -> bytes:
        """Return the packed result so far; empty if this node has not read what earlier nodes logged."""
        if not self._has_whole_log:
            return b""
        if self.is_task or self.output:
            return results.encode_result((), self.total_usage, [], output=self.output)
        choices = tuple(
            Choice(i, "".join(c.texts), tuple(c.token_ids), c.finish_reason) for i, c in enumerate(self._choices)
        )
        rows = [joined(c.rows) for c in self._choices]
        return results.encode_result(choices, self.total_usage, self._cuts, self._prompt_rows.packed, rows)

    @property
    def _has_whole_log(self) -> bool:
        """Whether this node has the job's whole log, including what earlier nodes wrote."""
        return bool(self._chunks) or not self.taken.num_chunks

    def ended(self, outcome: Outcome) -> EndedJob:
        """Return what the metrics need of the job at its end."""
        reason = self._choices[0].finish_reason
        lengths = [len(choice.token_ids) for choice in self._choices]
        return EndedJob(outcome, reason, self._usage(), self.max_tokens, len(lengths), max(lengths))

    @property
    def used(self) -> UsedTokens:
        """The resources that the job used up to its end."""
        used = UsedTokens(kv_token_ms=self.kv_token_ms_used, num_preemptions=self.num_preemptions)
        if self._has_whole_log:
            used["usage"], used["log_bytes"] = self._usage(), sum(map(len, self._chunks))
        return used

    @property
    def total_usage(self) -> Usage:
        """The tokens of all attempts, as result and chunks have them."""
        return self._usage() if self.spent is None else self._usage().plus(self.spent)

    def _usage(self) -> Usage:
        if self.usage is not None:
            return self.usage
        return Usage(self.num_prompt_tokens, self.num_output_tokens)

    def _seal(self, pack: Pack) -> None:
        while self.has_unsealed_prompt:
            self.seal_part(pack)
        fresh = [(i, c) for i, c in enumerate(self._choices) if c.fresh_texts]
        for i, c in fresh:
            is_last = c.finish_reason is not None and i == fresh[-1][0] and self.is_complete
            usage = self.total_usage if is_last else None
            chunk = self._with_prompt_tokens(c.take_fresh(self.taken.job_id, len(self._chunks), i, usage))
            self._append(chunk, seal(chunk, pack))

    def _with_prompt_tokens(self, chunk: Chunk) -> Chunk:
        return chunk if chunk.index else replace(chunk, num_prompt_tokens=self.num_prompt_tokens)

    def _append(self, chunk: Chunk, sealed: SealedChunk) -> None:
        self._chunks.append(sealed.data)
        self._cuts.append((chunk.choice, len(chunk.token_ids), len(chunk.text)))
        if sealed.rows.num_rows:
            self._choices[chunk.choice].rows.append(sealed.rows)
        self._prompt_rows.note(sealed.prompt_rows)
