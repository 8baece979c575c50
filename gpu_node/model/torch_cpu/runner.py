"""The model runner in plain torch, alone or as a rank. It runs on every CPU; other runners are tested against it."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.gpu_node.model.architecture.rank_part import RankAdapter, RankPart
from penstock.gpu_node.model.architecture.spec import state_bytes
from penstock.gpu_node.model.protocol import (
    NO_COPIES,
    Adapter,
    CacheSizes,
    Placement,
    RankBytes,
    StateSizes,
    StepPlan,
    StepResult,
)
from penstock.gpu_node.model.torch_common.exchanges import RankOutputs
from penstock.gpu_node.model.torch_common.memory_errors import translate_out_of_memory
from penstock.gpu_node.model.torch_common.one_thread import OneThreadRunner
from penstock.gpu_node.model.torch_common.sampler import logprobs_of, sample_rows, to_numpy
from penstock.gpu_node.model.torch_cpu.attention import KvCache, PagedAttention, copy_blocks
from penstock.gpu_node.model.torch_cpu.decoder import Decoder


class _Computed(NamedTuple):
    """What a step has computed, and when its copies were done."""

    logits: Tensor
    hidden: Tensor
    copied_s: float


class TorchRunner(OneThreadRunner):
    """Computes the steps of a model's part with our own layers.

    It may be one of several ranks that compute a model together. All of them get the same plans. Only rank 0 samples;
    the others ignore the plan's sampling rows and return no tokens. Stages of a pipeline compute a step in
    micro-batches.
    """

    all_sample = False
    """Whether ranks other than rank 0 sample too."""

    def __init__(
        self,
        part: RankPart,
        decoder: Decoder,
        attention: PagedAttention,
        sizes: CacheSizes,
        *,
        block_size: int,
        dtype: torch.dtype,
    ) -> None:
        """part: of the model, as the decoder and the attention have it."""
        super().__init__()
        spec = part.spec
        self._block_size = block_size
        self._dtype = dtype
        self._part = part
        self._sizes = sizes
        self._decoder = decoder
        self._attention = attention
        self._caches = [
            None if (own := layer.own_keys) is None else KvCache(own, sizes.num_blocks, block_size, dtype)
            for layer in spec.layers
        ]

    @property
    def cache_sizes(self) -> CacheSizes:
        """The number and size of the KV blocks."""
        return self._sizes

    @property
    def state_sizes(self) -> StateSizes:
        """The slots of recurrent states, which the decoder has."""
        return StateSizes(self._decoder.recurrent.num_slots, state_bytes(self._part.spec))

    @property
    def placement(self) -> Placement:
        """On the CPU. Layers are read from the checkpoint at the first step."""
        return Placement(leaves_core_free=self.leaves_core_free)

    @property
    def held(self) -> RankBytes:
        """The matrices as they are computed with, also those that are still to be read, and the KV blocks."""
        num_kv = sum(2 * cache.k.nbytes for cache in self._caches if cache is not None)
        return RankBytes(self._part.num_weights * self._dtype.itemsize, num_kv)

    @property
    def verifies_drafts(self) -> bool:
        """Whether a step may sample after any of its tokens; not with states, which take no token back."""
        return not self._part.spec.recurrences

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        """Start a step."""
        return self.thread.submit(self._step, plan)

    def logits(self, plan: StepPlan) -> NDArray[np.float32]:
        """Run a step that samples nothing and return the logits after each of its tokens, [num_tokens, vocab]."""
        return self.start_logits(plan).result()

    def start_logits(self, plan: StepPlan) -> Future[NDArray[np.float32]]:
        """Start a step as `logits` does."""
        return self.thread.submit(self._logits, plan)

    def set_adapter(self, adapter_slot: int, adapter: Adapter) -> None:
        """Load an adapter into a slot, after the steps that were already submitted."""
        self.start_adapter(adapter_slot, lambda: adapter).result()

    def start_adapter(self, adapter_slot: int, find: Callable[[], Adapter]) -> Future[None]:
        """Start to load an adapter as `set_adapter` does; all ranks between the same steps.

        If `find` or loading fails at one rank, it fails at all of them.
        """
        return self.thread.submit(self._set_adapter, adapter_slot, find)

    def _set_adapter(self, adapter_slot: int, find: Callable[[], Adapter]) -> None:
        decoder = self._decoder

        def load() -> None:
            adapter = find()
            own = adapter if decoder.exchanges.is_alone else RankAdapter(adapter, self._part)
            decoder.adapters.set(adapter_slot, own)

        decoder.exchanges.run((), load)

    @torch.inference_mode()
    def _logits(self, plan: StepPlan) -> NDArray[np.float32]:
        computed = self._computed(plan, np.arange(len(plan.token_ids)), len(plan.token_ids))
        return np.empty((0, 0), np.float32) if computed is None else computed.logits.numpy()

    def _computed(self, plan: StepPlan, tokens: NDArray[np.int64], num_logits: int) -> _Computed | None:
        """Copy blocks and compute a step; return None at other ranks than 0.

        tokens: indices of the wanted tokens; num_logits: of how many of them, the first ones, logits are wanted.
        """
        decoder, exchanges, part = self._decoder, self._decoder.exchanges, self._part
        with exchanges.needed_to_vote():
            batches = micro_batches(plan, tokens, self._block_size, part.num_stages)
            planned = [
                one
                for batch in (() if exchanges.is_alone else batches)
                for one in decoder.planned_exchanges(len(batch.plan.token_ids), len(batch.tokens))
            ]

        def compute() -> tuple[RankOutputs, float]:
            if len(plan.copies):
                copy_blocks(plan.copies, (cache for cache in self._caches if cache is not None))
            copied_s = time.perf_counter()
            outcome = self._outcome(batches, num_logits)
            shapes = (num_logits, part.vocab_width), (len(tokens) - num_logits, part.spec.hidden_size)
            return exchanges.place_for_others(outcome, shapes), copied_s

        outcome, copied_s = exchanges.run(planned, compute)
        collected = exchanges.collected(outcome)
        return None if collected is None else _Computed(decoder.logits(collected[0]), collected[1], copied_s)

    def _outcome(self, batches: list[MicroBatch], num_logits: int) -> RankOutputs:
        """Compute micro-batches one after another."""
        decoder, outputs, states = self._decoder, [], []
        for batch in batches:
            hidden = decoder.hidden(batch.plan, self._caches, self._attention, torch.from_numpy(batch.tokens))
            if hidden is not None:
                count = int(np.searchsorted(batch.rows, num_logits))
                outputs.append(decoder.outputs(hidden[:count]))
                states.append(hidden[count:].float())
        if len(outputs) < 2:
            return RankOutputs(outputs[0], states[0]) if outputs else RankOutputs(None, None)
        rows = [torch.from_numpy(batch.rows) for batch in batches]
        is_output = [some < num_logits for some in rows]
        of_outputs = torch.cat([some[own] for some, own in zip(rows, is_output, strict=True)])
        of_states = torch.cat([some[~own] for some, own in zip(rows, is_output, strict=True)])
        return RankOutputs(torch.cat(outputs)[of_outputs.argsort()], torch.cat(states)[of_states.argsort()])

    @translate_out_of_memory()
    @torch.inference_mode()
    def _step(self, plan: StepPlan) -> StepResult:
        begun_s = time.perf_counter()
        num_samples, scored, pooled = len(plan.sample_tokens), plan.scored, plan.pooled
        parts = plan.sample_tokens, *(some.tokens for some in (scored, pooled) if some is not None)
        with self._decoder.exchanges.needed_to_vote():
            wanted, num_pooled = np.concatenate(parts).astype(np.int64), 0 if pooled is None else len(pooled.tokens)
        computed = self._computed(plan, wanted, len(wanted) - num_pooled)
        if computed is None:
            return StepResult(np.empty(0, np.int32), 0.0, 0.0)
        logits, hidden, copied_s = computed
        computed_s = time.perf_counter()
        tokens, logprobs = sample_rows(logits[:num_samples], plan.sampling)
        scores = None
        if scored is not None:
            targets = torch.from_numpy(scored.targets)
            scores = to_numpy(*logprobs_of(logits[num_samples:], targets, scored.num_logprobs))
        sampled_s = time.perf_counter()
        spans_s = computed_s - copied_s, sampled_s - computed_s, copied_s - begun_s
        forward_ms, sample_ms, copy_ms = (span_s * 1e3 for span_s in spans_s)
        states = None if pooled is None else hidden.numpy()
        return StepResult(tokens, forward_ms, sample_ms, copy_ms, logprobs, scores, states)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Some sequences of a step."""

    plan: StepPlan
    """Its tokens alone, without copies and samples."""
    tokens: NDArray[np.int64]
    """[num_wanted]: indices into the plan's tokens, of which the hidden state is wanted."""
    rows: NDArray[np.int64]
    """[num_wanted]: the place of each one among the wanted tokens of the whole step, ascending."""


def micro_batches(plan: StepPlan, wanted: NDArray[np.int64], block_size: int, most: int) -> list[MicroBatch]:
    """Divide a step into at most `most` micro-batches with about as many tokens each.

    wanted: indices of the tokens whose hidden state is wanted. A sequence that reads a block which another one fills in
    this step is in the same micro-batch. The result depends on nothing else, so all ranks have the same.
    """
    counts = np.diff(plan.query_starts)
    parts = _shared_out(_linked(plan, block_size), counts, most) if most > 1 else [np.arange(len(counts))]
    return [_micro_batch(plan, wanted, seqs) for seqs in parts]


def _linked(plan: StepPlan, block_size: int) -> NDArray[np.int64]:
    """Return a number for each sequence, equal for those that share a block which the step fills."""
    num_seqs = len(plan.context_lens)
    group, owner = np.arange(num_seqs), dict[int, int]()
    firsts = plan.context_lens - np.diff(plan.query_starts)
    tables = [
        table[: -(-context // block_size)].tolist()
        for table, context in zip(plan.block_tables, plan.context_lens.tolist(), strict=True)
    ]
    for seq, (table, first) in enumerate(zip(tables, firsts.tolist(), strict=True)):
        for block in table[first // block_size :]:
            group[group == group[seq]] = group[owner.setdefault(block, seq)]
    for seq, (table, first) in enumerate(zip(tables, firsts.tolist(), strict=True)):
        for block in table[: first // block_size]:
            if block in owner:
                group[group == group[seq]] = group[owner[block]]
    return group


def _shared_out(group: NDArray[np.int64], counts: NDArray[np.int32], most: int) -> list[NDArray[np.int64]]:
    """Return the sequences of each micro-batch, ascending: the largest groups first, each to the smallest batch."""
    groups = sorted((np.flatnonzero(group == one) for one in np.unique(group)), key=lambda seqs: -counts[seqs].sum())
    parts: list[list[NDArray[np.int64]]] = [[] for _ in range(min(most, len(groups)))]
    sizes = [0] * len(parts)
    for seqs in groups:
        smallest = sizes.index(min(sizes))
        parts[smallest].append(seqs)
        sizes[smallest] += int(counts[seqs].sum())
    return [np.sort(np.concatenate(part)) for part in parts]


def _micro_batch(plan: StepPlan, wanted: NDArray[np.int64], seqs: NDArray[np.int64]) -> MicroBatch:
    counts = np.diff(plan.query_starts)[seqs]
    if len(seqs) == len(plan.context_lens):
        return MicroBatch(plan, wanted, np.arange(len(wanted)))
    at = np.concatenate([np.arange(plan.query_starts[seq], plan.query_starts[seq + 1]) for seq in seqs])
    places = np.full(len(plan.token_ids), -1, np.int64)
    places[at] = np.arange(len(at))
    rows = np.flatnonzero(places[wanted] >= 0)
    part = replace(
        plan,
        token_ids=plan.token_ids[at],
        positions=plan.positions[at],
        query_starts=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
        context_lens=plan.context_lens[seqs],
        block_tables=plan.block_tables[seqs],
        adapters=None if plan.adapters is None else plan.adapters[seqs],
        sample_tokens=np.empty(0, np.int32),
        copies=NO_COPIES,
        scored=None,
        pooled=None,
    )
    return MicroBatch(part, places[wanted[rows]], rows)
