"""Steps as CUDA graphs: the shapes that graphs are captured for, the padding of a step to one of them, the replay."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from penstock.gpu_node.model.gpu.device import Device
from penstock.gpu_node.model.gpu.inputs import Ints, StepInputs, aligned, size_of, to_device
from penstock.gpu_node.model.gpu.linear import padded_vocab
from penstock.kernels.triton.lora import LORA_ROWS
from penstock.kernels.triton.prefill_attention import QUERY_TILE
from penstock.kernels.triton.sampler import RULE_COLUMNS

MIXED_TOKENS = (16, 32, 64, 128, 256, 512, 768, 1024, 1536, 2048, 2560)
"""Token counts of mixed steps with a graph. A larger step runs for so long that its launches do not matter."""
FEW_PREFILLS = 32
"""Sequences of a mixed step that may have a query tile which is not full. A second graph takes all short prompts that
the step's tokens allow; most steps do without its padding tiles."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """The sizes that a graph's steps are padded to."""

    num_tokens: int
    num_seqs: int
    """Also the number of rows that decode, and of rows that sample."""
    num_tiles: int = 0
    """Query tiles of prefill attention. 0: every sequence decodes and samples."""
    num_adapter_tiles: int = 0
    """Tiles of tokens with an adapter. 0: the graph omits the adapter kernels."""
    has_states: bool = False
    """Whether the model has recurrent layers."""

    @property
    def num_sampled_adapter_tiles(self) -> int:
        """Tiles of sampling tokens with an adapter."""
        return min(self.num_seqs, self.num_adapter_tiles)

    @property
    def num_saves(self) -> int:
        """States that are saved beside the last one of each sequence: as many as there are sequences."""
        return self.num_seqs if self.has_states else 0

    def with_adapters(self) -> StepShape:
        """Return the shape of the same steps with adapters, where a tile holds consecutive tokens of one adapter."""
        return replace(self, num_adapter_tiles=self.num_tokens // LORA_ROWS + self.num_seqs)

    def holds(self, step: StepInputs[Ints]) -> bool:
        """Return whether a step can be padded to this shape."""
        return (
            len(step.token_ids) <= self.num_tokens
            and len(step.context_lens) <= self.num_seqs
            and len(step.tiles) <= self.num_tiles
            and len(step.adapter_tiles) <= self.num_adapter_tiles
            and len(step.state_saves) <= self.num_saves
        )


def bucket_sizes(max_num_seqs: int) -> list[int]:
    """Return the batch sizes with a graph: 1, 2, 4, 8, then multiples of 16 up to 256, then of 32.

    The last one is the first that holds `max_num_seqs`.
    """
    sizes = [1, 2, 4, 8, *range(16, 257, 16), *range(288, max(max_num_seqs, 256) + 32, 32)]
    return sizes[: bisect_left(sizes, max_num_seqs) + 1]


class GraphShapes:
    """The shapes of a runner's graphs: of steps in which every sequence decodes, and of all other steps."""

    def __init__(self, max_num_seqs: int, max_num_tokens: int, *, has_adapters: bool, has_states: bool = False) -> None:
        """max_num_tokens: of a step; has_states: whether the model has recurrent layers."""
        rows = bucket_sizes(max_num_seqs)
        self.max_rows = rows[-1]
        decode = [StepShape(size, size, has_states=has_states) for size in rows]
        mixed = [
            StepShape(tokens, min(tokens, self.max_rows), tokens // QUERY_TILE + num_prefills, has_states=has_states)
            for tokens in _mixed_tokens(max_num_tokens)
            for num_prefills in _prefill_counts(tokens, self.max_rows)
        ]
        self._decode = {False: decode}
        self._mixed = {False: mixed}
        if has_adapters:
            self._decode[True] = [shape.with_adapters() for shape in decode]
            self._mixed[True] = [shape.with_adapters() for shape in mixed]

    @property
    def all(self) -> list[StepShape]:
        """All shapes, those with the most tokens first."""
        shapes = [shape for kind in (self._mixed, self._decode) for some in kind.values() for shape in some]
        return sorted(shapes, key=lambda shape: (-shape.num_tokens, -shape.num_adapter_tiles, -shape.num_tiles))

    def find(self, step: StepInputs[Ints]) -> StepShape | str:
        """Return the smallest shape that holds a step, or the reason why the step has no graph."""
        num_extra = len(step.sampling) - len(step.rules)
        if num_extra:
            return "scored_or_pooled_tokens"
        num_seqs, has_adapters = len(step.context_lens), len(step.adapter_tiles) > 0
        decodes = len(step.token_ids) == num_seqs == len(step.sampling)
        shapes = (self._decode if decodes else self._mixed)[has_adapters]
        return next((shape for shape in shapes if shape.holds(step)), "too_large")


def _mixed_tokens(max_num_tokens: int) -> list[int]:
    at = bisect_left(MIXED_TOKENS, max_num_tokens)
    return [*MIXED_TOKENS[:at], *([max_num_tokens] if at < len(MIXED_TOKENS) else [])]


def _prefill_counts(num_tokens: int, max_rows: int) -> list[int]:
    """Return how many query tiles that are not full the graphs of a token count have, ascending.

    A prompt that has a tile takes at least two tokens.
    """
    most = min(num_tokens // 2, max_rows)
    return sorted({min(FEW_PREFILLS, most), most})


def pad_step(step: StepInputs[Ints], shape: StepShape) -> StepInputs[Ints]:
    """Append padding to a packed step up to a shape that holds it.

    Padding tokens store nothing. Padding sequences have no token. Padding rows of attention name sequence -1, which
    the kernels skip. Padding rows of sampling sample greedily after the first token.
    """
    # np.pad would take ten times as long, on the thread that every step waits for.
    states = (shape.num_tokens, shape.num_seqs, shape.num_seqs + 1) if shape.has_states else (0, 0, 0)
    rules = _longer(step.rules, shape.num_seqs)
    rules[len(step.rules) :, -1] = -1
    return replace(
        step,
        token_ids=_longer(step.token_ids, shape.num_tokens),
        positions=_longer(step.positions, shape.num_tokens),
        slots=_longer(step.slots, shape.num_tokens, -1),
        query_starts=_longer(step.query_starts, shape.num_seqs + 1, int(step.query_starts[-1])),
        context_lens=_longer(step.context_lens, shape.num_seqs),
        decoding=_longer(step.decoding, shape.num_seqs, -1),
        tiles=_longer(step.tiles, shape.num_tiles, -1),
        sampling=_longer(step.sampling, shape.num_seqs),
        rules=rules,
        adapter_tiles=_longer(step.adapter_tiles, shape.num_adapter_tiles),
        sampled_adapter_tiles=_longer(step.sampled_adapter_tiles, shape.num_sampled_adapter_tiles),
        owners=_longer(step.owners, states[0], -1),
        state_reads=_longer(step.state_reads, states[1], -1),
        state_writes=_longer(step.state_writes, states[1]),
        save_starts=_longer(step.save_starts, states[2], len(step.state_saves)),
        state_saves=_longer(step.state_saves, shape.num_saves),
    )


def _longer(rows: Ints, count: int, value: int = 0) -> Ints:
    """Return `rows` followed by rows of `value`, `count` in all."""
    longer = np.full((count, *rows.shape[1:]), value, np.int32)
    longer[: len(rows)] = rows
    return longer


def blank_step(shape: StepShape) -> StepInputs[Ints]:
    """Return a step of nothing but padding."""
    widths = {"tiles": 2, "rules": len(RULE_COLUMNS), "adapter_tiles": 3, "sampled_adapter_tiles": 3}
    widths |= {"state_saves": 2, "block_tables": 1}
    sizes = {field.name: (0, widths[field.name]) if field.name in widths else 0 for field in fields(StepInputs)}
    arrays = {name: np.zeros(size, np.int32) for name, size in sizes.items()}
    return pad_step(StepInputs(**arrays | {"query_starts": np.zeros(1, np.int32)}), shape)


Compute = Callable[[StepInputs[Tensor]], Tensor]
"""Runs a step and returns its logits. Stores the tokens of rows without penalties or masks for the next step."""


class StepGraphs:
    """The CUDA graphs of one decoder. All of them read a step from one device buffer."""

    def __init__(
        self,
        device: Device,
        compute: Compute,
        shapes: GraphShapes,
        max_blocks: int,
        logits: tuple[int, torch.dtype],
        report: Callable[[float], None],
    ) -> None:
        """max_blocks: KV blocks of one sequence; logits: the vocabulary size and the dtype of logits.

        report: takes the fraction of graphs that are captured.
        """
        self._shapes = shapes
        # Rows of whole lines of memory, as the head's product has them.
        padded = torch.zeros(shapes.max_rows, padded_vocab(logits[0]), dtype=logits[1], device=device.torch)
        self._logits = padded[:, : logits[0]]
        self._tables = torch.zeros(shapes.max_rows, max_blocks, dtype=torch.int32, device=device.torch)
        capacity = max(size_of(blank_step(shape)) for shape in shapes.all) + aligned(shapes.max_rows * max_blocks)
        self._inputs = torch.zeros(capacity, dtype=torch.int32, device=device.torch)
        self._replays: dict[StepShape, Callable[[], None]] = {}
        pool = None
        # The largest first: its memory pool is large enough for all other graphs.
        for shape in shapes.all:
            blank = blank_step(shape)
            packed = device.pinned(size_of(blank), dtype=torch.int32)
            step = replace(to_device(packed, self._inputs, blank), block_tables=self._tables[: shape.num_seqs])
            report(len(self._replays) / len(shapes.all))
            self._replays[shape], pool = device.capture(self._work(compute, step), pool)

    def find(self, step: StepInputs[Ints]) -> StepShape | str:
        """Return the shape of the graph that can run a packed step, or the reason why none can."""
        return self._shapes.find(step)

    def run(self, packed: Tensor, step: StepInputs[Ints], shape: StepShape) -> Tensor:
        """Replay the graph of a step that is padded to `shape`; return its logits, which the next replay overwrites.

        packed: a pinned staging buffer for the step.
        """
        tables = to_device(packed, self._inputs, step).block_tables
        self._tables[: tables.shape[0], : tables.shape[1]].copy_(tables)
        self._replays[shape]()
        return self._logits

    def _work(self, compute: Compute, step: StepInputs[Tensor]) -> Callable[[], None]:
        kept = self._logits[: len(step.rules)]

        def work() -> None:
            # All graphs share one memory pool, so results that outlive a replay are copied out of it.
            kept.copy_(compute(step))

        return work
