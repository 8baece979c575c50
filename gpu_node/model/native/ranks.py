"""The native runner as a group of ranks: what rank 0 tells the others, and their part of each step."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from penstock.contract.adapters import AdapterRef
from penstock.contract.errors import ConfigError, RequestError
from penstock.gpu_node.model.architecture.rank_part import Parallel, check_cuts
from penstock.gpu_node.model.architecture.spec import ModelSpec
from penstock.gpu_node.model.lora.library import AdapterLibrary
from penstock.gpu_node.model.native.packing import NativeAdapters
from penstock.gpu_node.model.options import RunnerOptions
from penstock.gpu_node.model.protocol import Adapter, RankBytes, RanksLostError, RankStats, StepPlan
from penstock.gpu_node.model.ranks.control import GroupMemory
from penstock.gpu_node.model.ranks.group import RankGroup, RankHandle
from penstock.gpu_node.model.ranks.messages import RankStep
from penstock.gpu_node.model.ranks.processes import RankProcess
from penstock.kernels.cpu.exchange import Exchange
from penstock.kernels.cpu.library import Ending, NativeModel, addresses
from penstock.kernels.cpu.structs import NativePlan, NativeShapes, NativeSpec

RANK_MODULE = "penstock.gpu_node.model.loading.rank_process"


class RankPlace(NamedTuple):
    """Which rank a model is, and of how many."""

    rank: int = 0
    size: int = 1

    def threads_of(self, num_threads: int) -> range:
        """Return which of the node's threads are this rank's."""
        return range(num_threads * self.rank // self.size, num_threads * (self.rank + 1) // self.size)


def check_size(size: int, spec: ModelSpec, num_threads: int) -> None:
    """Raise ConfigError unless a model can be divided among `size` ranks that have `num_threads` threads together."""
    check_cuts(spec, Parallel(size), "native")
    setting = f"tensor_parallel_size {size}"
    if size > num_threads:
        problem = f"the ranks have {num_threads} threads together (num_threads, or the usable cores)"
        raise ConfigError(f"{setting}: {problem}, and each needs one", param="tensor_parallel_size")


class SharedWeights(NamedTuple):
    """The file of packed weights that all ranks map."""

    descriptor: int
    key: str


class RankStart:
    """What the further ranks need to know: the model's files, the settings, and what rank 0 has decided."""

    def __init__(
        self, model: Path, options: RunnerOptions, weights: SharedWeights, *, num_blocks: int, num_threads: int
    ) -> None:
        """model: a folder or a GGUF file. num_threads: of all ranks together."""
        self._weights = weights
        self._size = options.tensor_parallel_size
        self._config: Mapping[str, Any] = {
            "model": str(model),
            "options": options.model_dump(mode="json", include=set(RunnerOptions.model_fields)),
            "size": self._size,
            "num_blocks": num_blocks,
            "num_threads": num_threads,
            "weights": list(weights),
            # The thread that starts ranks again may be pinned to a core, and they would inherit that.
            "cores": sorted(os.sched_getaffinity(0)),
        }

    def __call__(self, rank: int, memory: GroupMemory) -> RankHandle:
        """Start a rank. Raises OSError."""
        config = {**self._config, "rank": rank, "memory": memory.descriptors}
        return RankProcess(RANK_MODULE, config, (*memory.descriptors, self._weights.descriptor))


def facts_of(library: Path, shapes: NativeShapes) -> dict[str, str]:
    """Return what all ranks must agree on, by name. The library's name has a digest of the kernels."""
    fields = {name: getattr(shapes.spec, name) for name, *_ in NativeSpec._fields_ if name != "rank"}
    digest = blake2b(repr(fields).encode() + bytes(shapes.layers), digest_size=16).hexdigest()
    return {"kernel library": library.name, "model or settings": digest}


class NativeRanks:
    """Rank 0's use of its group. It is the model's partner in each step."""

    def __init__(
        self,
        model: NativeModel,
        group: RankGroup[Exchange],
        weights: SharedWeights,
        facts: Mapping[str, str],
        held: RankBytes,
    ) -> None:
        """Start the ranks. The descriptor of `weights` is closed with them. Raises as `RankGroup.start` does.

        held: by this rank.
        """
        self._model = model
        self._group = group
        self._facts = facts
        self._held = held
        self._adapters: dict[int, Adapter] = {}
        # An engine is not closed, but collected, or left to the end of the process.
        self._end = weakref.finalize(self, _end, group, weights.descriptor)
        self._begin()

    def _begin(self) -> None:
        memory = self._group.start(self._facts)
        self._model.use_shared(self._group.exchange.address, memory.rows.address, memory.rows.num_bytes)
        self._memory = memory  # The model has its addresses until it gets others.

    def hand_out(self, plan: StepPlan, native: NativePlan, *, returns_logits: bool) -> None:
        """Hand a step to the other ranks; the model then starts it. Raises MemoryError and RanksLostError."""
        needed = self._model.shared_bytes(native)
        self._group.hand_out_step(plan, needed, returns_logits=returns_logits)
        if (memory := self._group.memory) is not None:
            self._model.use_shared(self._group.exchange.address, memory.rows.address, memory.rows.num_bytes)

    def note_step_end(self) -> None:
        """Note that the step that was handed out has ended, or did not begin."""
        self._group.note_step_end()

    def check_ending(self) -> None:
        """Raise the error of the step that has ended: MemoryError if a rank had no memory for it, RanksLostError."""
        ending = self._model.ending
        if ending is Ending.NO_MEMORY:
            raise MemoryError("a rank ran out of memory")
        if ending is Ending.ABORTED:
            self._group.check()
            raise RanksLostError("the ranks were ended")

    def set_adapter(self, adapter_slot: int, adapter: Adapter, adapters: NativeAdapters) -> None:
        """Load an adapter into a slot of all ranks. Raises RequestError if one cannot."""
        self._group.hand_out_adapter(adapter_slot, AdapterRef(name=adapter.name, digest=adapter.digest))
        is_refused = True
        try:
            adapters.set(adapter_slot, adapter)
            is_refused = False
        finally:
            is_everywhere = self._group.meet(is_refused=is_refused)
        if not is_everywhere:
            raise RequestError(f"adapter {adapter.name!r} cannot be loaded by all ranks", code="adapter_unusable")
        self._adapters[adapter_slot] = adapter

    def recover(self, adapters: NativeAdapters) -> None:
        """Start all ranks again, and give them the adapters that they had."""
        self._begin()
        for adapter_slot, adapter in self._adapters.items():
            self.set_adapter(adapter_slot, adapter, adapters)

    @property
    def pids(self) -> list[int]:
        """The process of each further rank."""
        return self._group.pids

    @property
    def is_lost(self) -> bool:
        """Whether a rank was lost."""
        return self._group.is_lost

    @property
    def stats(self) -> RankStats:
        """What the ranks have spent at meetings."""
        stats = self._group.stats
        return stats if stats.lost else self._group.with_bytes(stats, self._held)

    def close(self) -> None:
        """End the ranks."""
        self._end()


def _end(group: RankGroup[Exchange], descriptor: int) -> None:
    group.close()
    os.close(descriptor)


class NativeRank:
    """A further rank's model: it computes its share of each step."""

    def __init__(self, model: NativeModel, adapters: NativeAdapters, library: AdapterLibrary, held: RankBytes) -> None:
        self.held = held
        self._model = model
        self._adapters = adapters
        self._library = library

    def bind_thread(self) -> None:
        """Schedule the calling thread like the model's own; it runs all steps."""
        self._model.bind_thread()

    def use(self, memory: GroupMemory, exchange: Exchange) -> None:
        """Set the memory that the ranks share."""
        self._memory = memory
        self._exchange = exchange

    def run(self, step: RankStep) -> None:
        """Compute this rank's share of a step."""
        rows = self._memory.rows
        self._model.use_shared(self._exchange.address, rows.address, rows.num_bytes)
        try:
            self._model.start(rank_plan(step))
        except MemoryError:
            return  # The others know: they computed nothing either.
        self._model.wait()

    def load_adapter(self, adapter_slot: int, adapter: AdapterRef) -> None:
        """Load an adapter of this digest into a slot."""
        self._adapters.set(adapter_slot, self._library.find(adapter))

    def close(self) -> None:
        """Free the model."""
        self._model.close()


def rank_plan(step: RankStep) -> NativePlan:
    """Return a step for a rank that does not sample. The step's arrays must outlive it."""
    names = ("token_ids", "positions", "query_starts", "block_tables", "sample_tokens")
    arrays = step.token_ids, step.positions, step.query_starts, step.block_tables, step.sample_tokens
    plan = NativePlan(len(step.token_ids), len(step.context_lens), len(step.sample_tokens), step.block_tables.shape[1])
    fields = dict(zip(names, addresses(*arrays), strict=True))
    fields["adapters"], fields["copies"] = addresses(step.adapters, step.copies)
    fields["scored_tokens"], fields["pooled_tokens"] = addresses(step.scored_tokens, step.pooled_tokens)
    # It writes no logits: the address only tells that rank 0 does.
    fields["logits"] = fields["token_ids"] if step.returns_logits else None
    for name, address in fields.items():
        setattr(plan, name, address)
    plan.num_copies, plan.num_scored = len(step.copies), len(step.scored_tokens)
    plan.num_pooled = len(step.pooled_tokens)
    return plan
