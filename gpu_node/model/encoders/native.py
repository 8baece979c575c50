"""The runner of encoders on the native kernels: packed texts without padding, in passes that fit its cache."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.gpu_node.model.checkpoint.description import Description
from penstock.gpu_node.model.checkpoint.source import Progress
from penstock.gpu_node.model.encoders.label_layers import LabelLayers
from penstock.gpu_node.model.native.load import (
    arithmetic_of,
    check_isa,
    kernels_for,
    new_model,
    set_positions,
    weight_bytes_of,
)
from penstock.gpu_node.model.native.ranks import RankPlace
from penstock.gpu_node.model.native.runner import CrowdedCores
from penstock.gpu_node.model.native.shapes import NativeUnavailableError, check_sizes, shapes_of
from penstock.gpu_node.model.native.weight_cache import WeightCache
from penstock.gpu_node.model.native.weight_loader import WeightLoader
from penstock.gpu_node.model.options import RunnerOptions
from penstock.gpu_node.model.protocol import Placement
from penstock.gpu_node.model.text_protocol import TextBatch, TextResult
from penstock.kernels.cpu.library import NativeModel, addresses
from penstock.kernels.cpu.probe import usable_cores
from penstock.kernels.cpu.structs import KvFormat, NativePlan

log = logging.getLogger(__package__)

PASS_TOKENS = 1024
"""Tokens of a pass through the layers, at most, unless a single text has more."""
_BLOCK = 16
_PASS_BLOCKS = 512
"""Blocks of the cache, at least. A text fills blocks of its own."""
_QUANTIZATIONS = {"auto": "none", "none": "none", "int8": "int8_group", "int8_group": "int8_group"}
"""One scale a row would cost embeddings too much."""


def load_native_encoder(
    described: Description, options: RunnerOptions, labels: LabelLayers | None, progress: Progress
) -> tuple[NativeTextRunner, str]:
    """Return the runner of an encoder and the name of its arithmetic.

    labels: the layers that make scores of labels of hidden states, if the model has such a head. Raises
    NativeUnavailableError for a machine or a model that the kernels do not support, and ConfigError for a checkpoint
    that is incomplete.
    """
    if options.dtype not in ("auto", "bfloat16"):
        raise NativeUnavailableError(f"the kernels compute in bfloat16, not {options.dtype}", "--dtype bfloat16")
    if options.quantization not in _QUANTIZATIONS:
        reason = f"quantization {options.quantization} is not supported for encoders; none and int8 are"
        raise NativeUnavailableError(reason, "--quantization int8")
    check_sizes(described.spec)
    check_isa(options)
    isa, library = kernels_for(options.cpu_isa, progress)
    quantization, kv_format = _QUANTIZATIONS[options.quantization], KvFormat.F16
    if described.source.gguf is not None and options.quantization == "auto":
        quantization = "auto"  # Matrices stay as the file has them.
    options = options.model_copy(update={"block_size": _BLOCK, "quantization": quantization})
    num_blocks = max(_PASS_BLOCKS, -(-described.max_model_len // _BLOCK))
    threads = options.num_threads or max(1, usable_cores() - options.reserved_cores)
    shapes = shapes_of(described, options, num_blocks, kv_format, RankPlace())
    model, placement = new_model(library, shapes, RankPlace(), threads)
    cache = WeightCache(described, f"{library.stem}-{quantization}") if options.weight_cache else None
    loader = WeightLoader(described, library, shapes, quantization, placement)
    formats, packing = loader.load(model, cache, progress)
    if packing is not None:
        packing.wait()
        packing.give()
        packing.close()
    set_positions(model, described)
    arithmetic = arithmetic_of(isa, formats, kv_format, rotated=False)
    log.info("native encoder", extra={"arithmetic": arithmetic, "num_threads": threads})
    runner = NativeTextRunner(
        model,
        hidden_size=described.hidden_size,
        num_types=0 if described.spec.encoder is None else described.spec.encoder.num_token_types,
        num_blocks=num_blocks,
        num_threads=threads,
        placement=Placement(
            weight_bytes_of(model, described.spec.num_layers, has_embedding=True),
            leaves_core_free=threads < usable_cores(),
        ),
        labels=labels,
    )
    return runner, arithmetic


class NativeTextRunner:
    """Runs each step on the native model's threads, in one pass or more."""

    def __init__(
        self,
        model: NativeModel,
        *,
        hidden_size: int,
        num_types: int,
        num_blocks: int,
        num_threads: int,
        placement: Placement,
        labels: LabelLayers | None,
    ) -> None:
        self._model = model
        self._hidden_size = hidden_size
        self._num_types = num_types
        self._num_blocks = num_blocks
        self._placement = placement
        self._labels = labels
        self._cores = CrowdedCores(num_threads)
        # The first of the model's threads. The engine's own work does not keep the others waiting at a barrier.
        self._thread = ThreadPoolExecutor(1, "penstock-encoder", initializer=model.bind_thread)

    @property
    def placement(self) -> Placement:
        """On the CPU."""
        return self._placement

    def submit(self, batch: TextBatch) -> Future[TextResult]:
        """Start a step. Its result raises MemoryError if there is not enough memory for a pass."""
        return self._thread.submit(self._step, batch)

    def _step(self, batch: TextBatch) -> TextResult:
        """Compute a step, pass after pass. The engine meanwhile prepares the next one and uses the rows of the last."""
        passes = list(self.passes_of(batch))
        for one in passes:
            self._model.start(one.plan())
            num_in_use = self._model.wait()
            self._cores.note_step(num_in_use, float(one.times_ms.sum()) / 1e3, packs=False)
        rows = [self._rows_of(one) for one in passes]
        took_ms = sum(float(one.times_ms.sum()) for one in passes)
        return TextResult(rows[0] if len(rows) == 1 else np.concatenate(rows), took_ms)

    def _rows_of(self, one: _Pass) -> NDArray[np.float32]:
        return one.hidden if self._labels is None else self._labels.rows(one.hidden, np.diff(one.query_starts))

    def passes_of(self, batch: TextBatch) -> Iterator[_Pass]:
        """Yield the passes of a step: neighboring texts that fit the cache."""
        lengths = np.diff(batch.starts)
        first = num_tokens = num_blocks = 0
        for at, (length, blocks) in enumerate(zip(lengths.tolist(), (-(-lengths // _BLOCK)).tolist(), strict=True)):
            fits = num_tokens + length <= PASS_TOKENS and num_blocks + blocks <= self._num_blocks
            if at > first and not fits:
                yield self._pass(batch, first, at)
                first, num_tokens, num_blocks = at, 0, 0
            num_tokens += length
            num_blocks += blocks
        if len(lengths):
            yield self._pass(batch, first, len(lengths))

    def _pass(self, batch: TextBatch, first: int, end: int) -> _Pass:
        starts = batch.starts[first : end + 1]
        tokens = slice(int(starts[0]), int(starts[-1]))
        query_starts = (starts - starts[0]).astype(np.int32)
        lengths = np.diff(query_starts)
        num_blocks = -(-lengths // _BLOCK)
        first_blocks = np.cumsum(num_blocks) - num_blocks
        num_tokens = int(query_starts[-1])
        # With a head that reads the first tokens alone, the last layer computes no others.
        pooled = query_starts[:-1] if self._labels is not None and self._labels.reads_first else np.arange(num_tokens)
        # A tokenizer may tell pairs apart where the model has a single type.
        types = np.minimum(batch.types[tokens], self._num_types - 1).astype(np.int32) if self._num_types else None
        return _Pass(
            token_ids=np.ascontiguousarray(batch.token_ids[tokens], np.int32),
            positions=(np.arange(num_tokens) - np.repeat(query_starts[:-1], lengths)).astype(np.int32),
            query_starts=query_starts,
            # Behind a text's last block there are others, which no token of it reads.
            block_tables=(first_blocks[:, None] + np.arange(num_blocks.max())).astype(np.int32),
            types=types,
            pooled=pooled.astype(np.int32),
            hidden=np.empty((len(pooled), self._hidden_size), np.float32),
            times_ms=np.zeros(3, np.float32),
        )

    def close(self) -> None:
        """End the model's threads and free its memory."""
        self._thread.shutdown()
        self._model.close()


@dataclass(frozen=True, slots=True, eq=False)
class _Pass:
    """Whole texts on their way through the layers; keeps the arrays alive that the kernels read and write."""

    token_ids: NDArray[np.int32]
    positions: NDArray[np.int32]
    query_starts: NDArray[np.int32]
    block_tables: NDArray[np.int32]
    types: NDArray[np.int32] | None
    pooled: NDArray[np.int32]
    """The tokens whose hidden states are wanted."""
    hidden: NDArray[np.float32]
    times_ms: NDArray[np.float32]

    def plan(self) -> NativePlan:
        """Return the step of the kernels, which samples nothing."""
        names = "token_ids", "positions", "query_starts", "block_tables", "token_types", "pooled_tokens", "hidden"
        arrays = self.token_ids, self.positions, self.query_starts, self.block_tables, self.types, self.pooled
        return NativePlan(
            num_tokens=len(self.token_ids),
            num_seqs=len(self.query_starts) - 1,
            block_table_stride=self.block_tables.shape[1],
            num_pooled=len(self.pooled),
            times_ms=addresses(self.times_ms)[0],
            **dict(zip(names, addresses(*arrays, self.hidden), strict=True)),
        )
