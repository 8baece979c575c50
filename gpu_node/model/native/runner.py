"""The runner that executes step plans on the native kernels, which take counts and addresses of arrays."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.contract.errors import InvariantError
from penstock.gpu_node.model.native.packing import NativeAdapters
from penstock.gpu_node.model.native.ranks import NativeRanks
from penstock.gpu_node.model.native.weight_loader import BackgroundPacking
from penstock.gpu_node.model.protocol import (
    NO_RANKS,
    Adapter,
    CacheSizes,
    Logprobs,
    Placement,
    RanksLostError,
    RankStats,
    SamplingRows,
    StateSizes,
    StepPlan,
    StepResult,
)
from penstock.kernels.cpu.library import NativeModel, addresses
from penstock.kernels.cpu.structs import SAMPLING_COLUMNS, NativePlan

log = logging.getLogger(__package__)


class StepOutputs(NamedTuple):
    """The arrays that the kernels write a step's results to."""

    tokens: NDArray[np.int32]
    logprobs: Logprobs | None
    scores: Logprobs | None
    times_ms: NDArray[np.float32]
    hidden: NDArray[np.float32] | None


_columns_of = attrgetter(*SAMPLING_COLUMNS)
"""Returns the columns of SamplingRows in the order of a NativePlan."""


class SamplingAddresses:
    """The addresses of a step's sampling columns, kept from the last step, because NumPy takes a microsecond for each.

    Most columns are the same arrays until the batch changes. They are kept too, so that no other array takes their
    place in memory.
    """

    def __init__(self) -> None:
        self._columns: list[NDArray[Any] | None] = [None] * len(SAMPLING_COLUMNS)
        self._addresses = addresses(*self._columns)

    def of(self, rows: SamplingRows) -> list[int | None]:
        """Return the addresses of the columns of `rows`, in the order of a NativePlan."""
        for i, column in enumerate(_columns_of(rows)):
            if column is not self._columns[i]:
                self._columns[i] = column
                self._addresses[i] = addresses(column)[0]
        return self._addresses


def step_fields(plan: StepPlan, sampling: list[int | None]) -> tuple[int | None, ...]:
    """Return the fields of a NativePlan that come before its ragged ones. `sampling`: see SamplingAddresses."""
    return (
        *(len(plan.token_ids), len(plan.context_lens), len(plan.sample_tokens)),
        plan.block_tables.strides[0] // plan.block_tables.itemsize,
        *addresses(plan.token_ids, plan.positions, plan.query_starts, plan.block_tables, plan.sample_tokens),
        *sampling,
    )


def logprob_buffers(num_logprobs: NDArray[np.int32] | None, vocab_size: int) -> Logprobs | None:
    """Allocate uninitialized logprobs, wide enough for the row that wants the most; None where no row wants any."""
    if num_logprobs is None:
        return None
    shape = len(num_logprobs), 1 + min(int(num_logprobs.max()), vocab_size)
    return Logprobs(np.empty(shape, dtype=np.int32), np.empty(shape, dtype=np.float32))


def wanted_logprobs(plan: StepPlan, outputs: StepOutputs) -> dict[str, int | None]:
    """Return the fields of a NativePlan for logprobs and scores."""
    fields: dict[str, int | None] = {}
    if (buffers := outputs.logprobs) is not None:
        arrays = plan.sampling.num_logprobs, buffers.token_ids, buffers.values
        fields |= zip(("num_logprobs", "logprob_ids", "logprobs"), addresses(*arrays), strict=True)
        fields["logprobs_width"] = buffers.values.shape[1]
    if (scored := plan.scored) is not None and (buffers := outputs.scores) is not None:
        names = "scored_tokens", "score_targets", "num_score_logprobs", "score_ids", "scores"
        wanted = scored.tokens, scored.targets, scored.num_logprobs
        fields |= zip(names, addresses(*wanted, buffers.token_ids, buffers.values), strict=True)
        fields |= {"num_scored": len(scored.tokens), "scores_width": buffers.values.shape[1]}
    return fields


def wanted_hidden(plan: StepPlan, outputs: StepOutputs) -> dict[str, int | None]:
    """Return the fields of a NativePlan for hidden states."""
    if plan.pooled is None:
        return {}
    tokens, hidden = addresses(plan.pooled.tokens, outputs.hidden)
    return {"num_pooled": len(plan.pooled.tokens), "pooled_tokens": tokens, "hidden": hidden}


def state_fields(plan: StepPlan) -> dict[str, int | None]:
    """Return the fields of a NativePlan for the slots of recurrent states."""
    if (states := plan.states) is None:
        return {}
    reads, writes, saves = addresses(states.reads, states.writes, states.saves)
    return {"state_reads": reads, "state_writes": writes, "state_saves": saves, "num_saves": len(states.saves)}


def window_fields(plan: StepPlan) -> dict[str, int | None]:
    """Return the fields of a NativePlan for the blocks of windows. Their tables are as wide as the plan's."""
    if (windows := plan.windows) is None:
        return {}
    if windows.block_tables.strides != plan.block_tables.strides:
        raise InvariantError("the tables of windows are not as wide as the others")
    tables, copies = addresses(windows.block_tables, windows.copies)
    return {"window_tables": tables, "window_copies": copies, "num_window_copies": len(windows.copies)}


Table: TypeAlias = NDArray[Any] | None
NOTHING_RAGGED: tuple[Table, ...] = (None,) * 10


def ragged_fields(rows: SamplingRows) -> tuple[Table, ...]:
    """Return the per-row lists of `rows` as tables of addresses and lengths; None where all lists are empty."""
    seen, num_seen = _table(rows.seen)
    banned, num_banned = _table(rows.banned)
    biased, num_biased = _table(rows.biased)
    biases = None if biased is None else _pointers(rows.biases)
    masks = written = None
    if (given := rows.masks) is not None:
        # The address of each row's mask; 0 for rows without a mask.
        starts = given.words.ctypes.data + given.rows.astype(np.uint64) * np.uint64(given.words.strides[0])
        masks, written = np.where(given.rows >= 0, starts, np.uint64(0)), given.written
    return seen, num_seen, rows.num_seen_prompt, banned, num_banned, biased, biases, num_biased, masks, written


def _table(lists: Sequence[NDArray[np.int32]]) -> tuple[Table, Table]:
    if not any(map(len, lists)):
        return None, None
    return _pointers(lists), np.array([len(ids) for ids in lists], dtype=np.int32)


def _pointers(lists: Sequence[NDArray[Any]]) -> NDArray[np.uint64]:
    return np.array(addresses(*lists), dtype=np.uint64)


_RECOVERY_S = 5.0
"""Seconds of steps after packing in which a model may still leave out threads whose cores are free again."""


class CrowdedCores:
    """Warns once if threads are left out of steps because their cores are busy, except with the model's own packing."""

    def __init__(self, num_threads: int) -> None:
        """num_threads: those of the model."""
        self._num_threads = num_threads
        self._recovery_s = 0.0
        self._is_warned = False

    def note_step(self, num_in_use: int, took_s: float, *, packs: bool) -> None:
        """Note how many threads computed a step, and whether the model's weights were packed meanwhile."""
        if packs:
            self._recovery_s = _RECOVERY_S
        elif num_in_use == self._num_threads:
            self._recovery_s = 0.0
        elif self._recovery_s > 0:
            self._recovery_s -= took_s
        elif num_in_use > 0 and not self._is_warned:
            self._is_warned = True
            extra = {"num_threads": self._num_threads, "num_in_use": num_in_use}
            log.warning("other processes use the cores", extra=extra)


TokenRows: TypeAlias = Callable[[NDArray[np.int32]], NDArray[np.float32]]
"""Returns the embeddings of tokens for each layer, [num_tokens, layers * size]."""


class NativeRunner:
    """Runs each step on the native model's threads; `submit` starts the step and returns at once."""

    max_in_flight = 1

    def __init__(
        self,
        model: NativeModel,
        adapters: NativeAdapters,
        sizes: CacheSizes,
        *,
        vocab_size: int,
        hidden_size: int,
        states: StateSizes,
        num_threads: int,
        leaves_core_free: bool,
        weight_bytes: int,
        packing: BackgroundPacking | None = None,
        ranks: NativeRanks | None = None,
        token_rows: TokenRows | None = None,
    ) -> None:
        """packing: of the weights; until it is done, the model reads the rows of the checkpoint.

        ranks: those that compute each step together with this model.
        """
        self._model = model
        self._adapters = adapters
        self._sizes = sizes
        self._vocab_size = vocab_size
        self._hidden_size = hidden_size
        self._states = states
        self._leaves_core_free = leaves_core_free
        self._weight_bytes = weight_bytes
        self._packing = packing
        self._ranks = ranks
        self._token_rows = token_rows
        self._cores = CrowdedCores(num_threads)
        self._sampling = SamplingAddresses()
        self._started_s = 0.0
        self.num_threads_in_use = num_threads
        """The threads that computed the last step; fewer than num_threads while other processes occupy some cores."""

    @property
    def cache_sizes(self) -> CacheSizes:
        """The number and size of the KV blocks."""
        return self._sizes

    @property
    def state_sizes(self) -> StateSizes:
        """The number and size of the slots of recurrent states."""
        return self._states

    @property
    def placement(self) -> Placement:
        """Where the model computes: on the CPU."""
        return Placement(self._weight_bytes, leaves_core_free=self._leaves_core_free)

    @property
    def verifies_drafts(self) -> bool:
        """Whether a step may sample after any of its tokens; not with states, which take no token back."""
        return not self._states.num_slots

    def bind_thread(self) -> None:
        """Pin the calling thread like the model's threads, which leave it a core if there are enough cores."""
        self._model.bind_thread()

    def submit(self, plan: StepPlan) -> _InFlightStep:
        """Start a step."""
        tokens, times_ms = np.empty(len(plan.sample_tokens), dtype=np.int32), np.zeros(3, dtype=np.float32)
        ragged, pooled = ragged_fields(plan.sampling), plan.pooled
        hidden = None if pooled is None else np.empty((len(pooled.tokens), self._hidden_size), np.float32)
        logprobs = logprob_buffers(plan.sampling.num_logprobs, self._vocab_size)
        scores = None if plan.scored is None else logprob_buffers(plan.scored.num_logprobs, self._vocab_size)
        outputs = StepOutputs(tokens, logprobs, scores, times_ms, hidden)
        own = self._own_inputs(plan)
        native = NativePlan(
            *step_fields(plan, self._sampling.of(plan.sampling)),
            *addresses(*ragged, plan.adapters),
            len(plan.copies),
            *addresses(plan.copies, tokens, None, times_ms),
            **wanted_logprobs(plan, outputs),
            **wanted_hidden(plan, outputs),
            **state_fields(plan),
            **window_fields(plan),
            token_inputs=addresses(own)[0],
        )
        self._start(plan, native)
        return _InFlightStep(self._wait, outputs, plan, ragged, own)

    def _own_inputs(self, plan: StepPlan) -> NDArray[np.float32] | None:
        """Return the embeddings of a step's tokens for each layer; None if the model has none."""
        return None if self._token_rows is None else self._token_rows(plan.token_ids)

    def logits(self, plan: StepPlan) -> NDArray[np.float32]:
        """Run a step that samples nothing and return the logits after each of its tokens, [num_tokens, vocab]."""
        logits = np.empty((len(plan.token_ids), self._vocab_size), dtype=np.float32)
        times_ms = np.zeros(3, dtype=np.float32)
        rest = *addresses(plan.adapters), len(plan.copies), *addresses(plan.copies)
        fields = step_fields(plan, self._sampling.of(plan.sampling))
        own = self._own_inputs(plan)
        more = state_fields(plan) | window_fields(plan) | {"token_inputs": addresses(own)[0]}
        native = NativePlan(*fields, *NOTHING_RAGGED, *rest, *addresses(None, logits, times_ms), **more)
        self._start(plan, native, returns_logits=True)
        self._wait()
        return logits

    def wait_until_packed(self) -> None:
        """Wait until all weights are packed, and use them. No step may be running."""
        if self._packing is not None:
            self._packing.wait()
            self._use_packed()

    def _use_packed(self) -> None:
        """Use the packed weights from this step on, as far as they are ready."""
        if self._packing is not None and self._packing.give():
            self._packing = None

    def _start(self, plan: StepPlan, native: NativePlan, *, returns_logits: bool = False) -> None:
        if self._states.num_slots and plan.states is None:
            raise InvariantError("a step of a model with recurrent layers names no states")
        if self._sizes.windows.num_blocks and plan.windows is None:
            raise InvariantError("a step of a model whose windows have blocks of their own names none of these")
        self._use_packed()
        self._started_s = time.monotonic()
        if self._ranks is not None:
            self._ranks.hand_out(plan, native, returns_logits=returns_logits)
        try:
            self._model.start(native)
        except BaseException:
            if self._ranks is not None:
                self._ranks.note_step_end()
            raise

    def _wait(self) -> None:
        self.num_threads_in_use = self._model.wait()
        if self._packing is not None:
            self._packing.begin()
        took_s = time.monotonic() - self._started_s
        self._cores.note_step(self.num_threads_in_use, took_s, packs=self._packing is not None)
        if self._ranks is not None:
            self._ranks.note_step_end()
            self._ranks.check_ending()

    def set_adapter(self, adapter_slot: int, adapter: Adapter) -> None:
        """Wait for the step in flight, then load an adapter into a slot."""
        self._model.wait()
        if self._ranks is None:
            self._adapters.set(adapter_slot, adapter)
        else:
            self._ranks.set_adapter(adapter_slot, adapter, self._adapters)

    def recover(self) -> None:
        """Start the ranks again after one was lost."""
        self._model.wait()
        if self._ranks is not None:
            self._ranks.recover(self._adapters)

    @property
    def rank_pids(self) -> list[int]:
        """The process of each further rank; none without ranks."""
        return [] if self._ranks is None else self._ranks.pids

    @property
    def is_lost(self) -> bool:
        """Whether a rank was lost; never without ranks."""
        return self._ranks is not None and self._ranks.is_lost

    @property
    def ranks(self) -> RankStats:
        """The ranks, and what they have spent at meetings."""
        return NO_RANKS if self._ranks is None else self._ranks.stats

    def close(self) -> None:
        """End the model's threads and free its memory."""
        if self._packing is not None:
            self._packing.close()
        if self._ranks is not None:
            self._model.wait()
            self._ranks.close()
        self._model.close()


class _InFlightStep:
    """A step that may still be running; keeps the arrays alive that the kernels read and write."""

    def __init__(self, wait: Callable[[], None], outputs: StepOutputs, *inputs: Any) -> None:
        self._wait = wait
        self._outputs = outputs
        self._inputs = inputs
        self._is_complete = False
        self._error: Exception | None = None

    def __del__(self) -> None:
        # The kernels may still access the arrays of a step that was never waited for.
        self._complete()

    def result(self) -> StepResult:
        self._complete()
        if self._error is not None:
            raise self._error
        tokens, logprobs, scores, times_ms, hidden = self._outputs
        forward_ms, sample_ms, copy_ms = times_ms.tolist()
        return StepResult(tokens, forward_ms, sample_ms, copy_ms, logprobs, scores, hidden)

    def _complete(self) -> None:
        if not self._is_complete:
            self._is_complete = True
            try:
                self._wait()
            except (MemoryError, RanksLostError) as error:
                self._error = error
