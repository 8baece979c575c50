"""The jobs that a node holds: what it took, what it generated, and what Redis has acknowledged. Pure data, no I/O."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from penstock.contract.errors import InvariantError, PenstockError
from penstock.contract.job import MAX_TOKENS_LIMIT, Choice, Chunk, FinishReason, Outcome, SamplingParams, Usage
from penstock.contract.logprobs import PROMPT_TOKENS_PER_CHUNK
from penstock.contract.priority import NUM_PRIORITIES
from penstock.gpu_node.choice_text import ChoiceText
from penstock.gpu_node.engine.policy.length_predictor import LengthPredictor
from penstock.gpu_node.engine.records import StepOutput
from penstock.gpu_node.monitor.counters import NodeCounts
from penstock.gpu_node.packed_chunks import PromptRows, SealedChunk, seal
from penstock.queue import msgpack_codec, results
from penstock.queue.admission import PREDICTED_OUTPUT_TOKENS
from penstock.queue.broker.node import MAX_PREEMPTIONS, Emission, Taken, UsedTokens
from penstock.queue.msgpack_codec import Pack
from penstock.queue.packed_logprobs import joined
from penstock.queue.policy import HOLD_MS, learned_hold_ms

RESERVED_QUANTILE = 0.9
"""Quantile of output lengths that is reserved for a job. Longer outputs may cause preemptions."""


class HeldJob:
    """One job of this node. Its chunks are kept until it ends, because a Redis that lost writes asks for them again.

    0 <= num_acknowledged <= len(chunks): chunks from `num_acknowledged` on may be missing in the job's log in Redis.
    """

    def __init__(self, taken: Taken) -> None:
        self.taken = taken
        self.params = SamplingParams()
        self.num_prompt_tokens = 0
        """0 until the prompt has been tokenized."""
        self.predicted_tokens = PREDICTED_OUTPUT_TOKENS
        """Predicted upper bound of each choice's output."""
        self.max_output_tokens = MAX_TOKENS_LIMIT
        """Largest possible output of each choice."""
        self.expires_s = math.inf
        """Deadline on this process's monotonic clock."""
        self.kv_token_ms = 0.0
        """KV-token-milliseconds of the choices that have ended, for the fair queue."""
        self.num_acknowledged = 0
        self.is_in_engine = False
        self.outcome: Outcome | None = None
        """Set once this node has decided how the job ends; finish is then due in Redis."""
        self.usage: Usage | None = None
        self.error: PenstockError | None = None
        """Why a choice failed, when the request itself is the cause."""
        self._chunks: list[bytes] = []
        self._cuts: list[tuple[int, int, int]] = []
        self._choices: list[ChoiceText] = [ChoiceText()]
        self._prompt_rows = PromptRows()

    @property
    def job_id(self) -> str:
        """The job's public id."""
        return self.taken.job_id

    @property
    def has_failed_choice(self) -> bool:
        """Whether a choice ended because the model failed at it."""
        return any(c.finish_reason == "error" for c in self._choices)

    @property
    def num_sequences(self) -> int:
        """Number of choices that have not ended; 1 until the prompt has been tokenized."""
        return sum(c.finish_reason is None for c in self._choices) if self.num_prompt_tokens else 1

    @property
    def expected_kv_tokens(self) -> int:
        """KV tokens that it is expected to use: its prompt, and for each open choice its actual or predicted output."""
        if not self.num_prompt_tokens:
            return self.taken.cost
        return self._kv_tokens_with(min(self.max_tokens, self.predicted_tokens))

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
        return self.kv_token_ms if self.is_complete or not self.is_in_engine else None

    @property
    def ended_lengths(self) -> list[int]:
        """Output lengths of the choices that ended by themselves, in tokens."""
        return [len(c.token_ids) for c in self._choices if c.finish_reason in ("stop", "length")]

    @property
    def unsent_bytes(self) -> int:
        """Bytes of encoded chunks that Redis has not acknowledged."""
        if self.num_acknowledged == len(self._chunks):
            return 0
        return sum(map(len, self._chunks[self.num_acknowledged :]))

    @property
    def is_complete(self) -> bool:
        """Whether every choice has ended."""
        # Not all(): this runs for every token, and a generator costs three times as much.
        return None not in [c.finish_reason for c in self._choices]

    def open(self, params: SamplingParams, logged: Sequence[Chunk] = (), sealed: Sequence[SealedChunk] = ()) -> None:
        """Create the job's choices, with what earlier nodes logged of them. `sealed`: the same chunks, packed."""
        self.params = params
        self._choices = [ChoiceText() for _ in range(params.n)]
        for chunk, one in zip(logged, sealed or map(seal, logged), strict=True):
            self._choices[chunk.choice].extend(chunk)
            self.usage = chunk.usage or self.usage
            self._append(chunk, one)
        self.num_acknowledged = len(self._chunks)

    def choice_so_far(self, choice: int) -> tuple[tuple[int, ...], str, FinishReason | None]:
        """Return (token ids, text, finish reason) of one choice."""
        c = self._choices[choice]
        return tuple(c.token_ids), "".join(c.texts), c.finish_reason

    def add_tokens(self, output: StepOutput) -> None:
        """Add a choice's output of one step. It becomes a chunk when it is sent."""
        c = self._choices[output.choice]
        if output.position != len(c.token_ids):
            problem = f"token {output.position} after {len(c.token_ids)} tokens"
            raise InvariantError(f"{self.job_id} choice {output.choice}: {problem}")
        c.extend(output, is_fresh=True)
        self.error = self.error or output.error
        self._prompt_rows.take(output.prompt_logprobs)
        if len(c.fresh_logprobs) >= PROMPT_TOKENS_PER_CHUNK:
            # Happens while Redis is unavailable. One chunk with all of them would block a reader's event loop.
            self._seal(msgpack_codec.pack)

    @property
    def has_unsealed_prompt(self) -> bool:
        """Whether prompt log-probabilities wait to be packed into a chunk."""
        return self._prompt_rows.is_pending

    def seal_part(self, pack: Pack = msgpack_codec.pack) -> None:
        """Pack the next part of the prompt's log-probabilities into a chunk; takes about a millisecond."""
        chunk = self._prompt_rows.next_chunk(self.job_id, len(self._chunks))
        self._append(chunk, seal(chunk, pack))

    def emission(self, pack: Pack = msgpack_codec.pack) -> Emission:
        """Return all that Redis has not acknowledged. Steps that accumulated become one chunk per choice."""
        self._seal(pack)
        chunks = tuple(self._chunks[self.num_acknowledged :])
        return Emission(self.taken.job_id, self.taken.lease, self.num_acknowledged, chunks)

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
        choices = tuple(
            Choice(i, "".join(c.texts), tuple(c.token_ids), c.finish_reason) for i, c in enumerate(self._choices)
        )
        rows = [joined(c.rows) for c in self._choices]
        return results.encode_result(choices, self._usage(), self._cuts, self._prompt_rows.packed, rows)

    @property
    def _has_whole_log(self) -> bool:
        """Whether this node has the job's whole log, including what earlier nodes wrote."""
        return bool(self._chunks) or not self.taken.num_chunks

    @property
    def used(self) -> UsedTokens:
        """The resources that the job used up to its end."""
        if not self._has_whole_log:
            return UsedTokens(kv_token_ms=self.kv_token_ms_used)
        return UsedTokens(kv_token_ms=self.kv_token_ms_used, usage=self._usage(), log_bytes=sum(map(len, self._chunks)))

    def _usage(self) -> Usage:
        if self.usage is not None:
            return self.usage
        return Usage(self.num_prompt_tokens, sum(len(c.token_ids) for c in self._choices))

    def _seal(self, pack: Pack) -> None:
        while self.has_unsealed_prompt:
            self.seal_part(pack)
        fresh = [(i, c) for i, c in enumerate(self._choices) if c.fresh_texts]
        for i, c in fresh:
            is_last = c.finish_reason is not None and i == fresh[-1][0] and self.is_complete
            usage = self._usage() if is_last else None
            chunk = c.take_fresh(self.taken.job_id, len(self._chunks), i, usage)
            self._append(chunk, seal(chunk, pack))

    def _append(self, chunk: Chunk, sealed: SealedChunk) -> None:
        self._chunks.append(sealed.data)
        self._cuts.append((chunk.choice, len(chunk.token_ids), len(chunk.text)))
        if sealed.rows.num_rows:
            self._choices[chunk.choice].rows.append(sealed.rows)
        self._prompt_rows.note(sealed.prompt_rows)


class Ledger:
    """All jobs of a node. The engine knows a job by its lease, so tokens computed under an older lease never mix in."""

    def __init__(self, max_model_len: int = MAX_TOKENS_LIMIT) -> None:
        self._max_model_len = max_model_len
        self.counts = NodeCounts()
        self._jobs: dict[str, HeldJob] = {}
        self._by_lease: dict[str, HeldJob] = {}
        self._predictor = LengthPredictor(RESERVED_QUANTILE)
        self.hold_ms = HOLD_MS
        """How long each KV token of a job's cost was held, in milliseconds; an average over jobs that ended here."""

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[HeldJob]:
        return iter(list(self._jobs.values()))

    @property
    def job_ids(self) -> list[str]:
        """Ids of all held jobs."""
        return list(self._jobs)

    def get(self, job_id: str) -> HeldJob | None:
        """Return the job, or None if the node does not hold it."""
        return self._jobs.get(job_id)

    def of_lease(self, lease: str) -> HeldJob | None:
        """Return the job held under exactly this lease, or None."""
        return self._by_lease.get(lease)

    def add(self, job: HeldJob) -> None:
        """Hold a job. It replaces the same job under an older lease."""
        older = self._jobs.get(job.job_id)
        if older is not None:
            self.remove(older)
        self._jobs[job.job_id] = job
        self._by_lease[job.taken.lease] = job

    def remove(self, job: HeldJob) -> None:
        """Remove a job; no effect if it is not held under this lease."""
        if self._by_lease.pop(job.taken.lease, None) is not None:
            del self._jobs[job.job_id]

    def open(self, job: HeldJob, num_prompt_tokens: int) -> None:
        """Set a job's prompt length and predict its output length."""
        job.num_prompt_tokens = num_prompt_tokens
        known = self._predictor.predict(job.taken.tenant, num_prompt_tokens, job.max_tokens)
        if known is not None:
            job.predicted_tokens = known
        job.max_output_tokens = max(1, min(job.max_tokens, self._max_model_len - num_prompt_tokens))
        if job.taken.preemptions >= MAX_PREEMPTIONS:
            # It was moved too often: reserve its longest possible output, so that it can finish here.
            job.predicted_tokens = job.max_output_tokens

    @property
    def predicted_outputs(self) -> tuple[tuple[int, int, int], ...]:
        """Predicted output lengths, for the admission of new jobs; see `NodePressure`."""
        return self._predictor.of_all_tenants()

    def learn(self, job: HeldJob) -> None:
        """Update the length predictor and `hold_ms` with a job that has no open choice left."""
        for length in job.ended_lengths:
            prompt, predicted = job.num_prompt_tokens, min(job.max_tokens, job.predicted_tokens)
            self._predictor.ended(job.taken.tenant, prompt, job.max_tokens, length, predicted)
        self.hold_ms = learned_hold_ms(self.hold_ms, job.kv_token_ms, job.taken.cost)

    def expected_usage(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """Return expected KV tokens and sequences, each per class: sums over jobs of that or a more urgent class."""
        tokens, sequences = [0, 0, 0], [0, 0, 0]
        for job in self._jobs.values():
            if job.outcome is None:
                for urgency in range(job.taken.urgency, NUM_PRIORITIES):
                    tokens[urgency] += job.expected_kv_tokens
                    sequences[urgency] += job.num_sequences
        return (tokens[0], tokens[1], tokens[2]), (sequences[0], sequences[1], sequences[2])

    @property
    def unsent_bytes(self) -> int:
        """Bytes of encoded chunks that Redis has not acknowledged, over all jobs."""
        return sum(job.unsent_bytes for job in self._jobs.values())
