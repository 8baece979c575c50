"""The sizes of steps that CUDA graphs are captured for, and the padding of a step to one of them."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, fields, replace

import numpy as np

from penstock.gpu_node.model.gpu.inputs import Ints, StepInputs
from penstock.kernels.triton.lora import LORA_ROWS
from penstock.kernels.triton.prefill_attention import QUERY_TILE
from penstock.kernels.triton.sampler import RULE_COLUMNS

MIXED_TOKENS = (16, 32, 64, 128, 256, 512, 768, 1024, 1536, 2048, 2560)
"""Token counts of mixed steps with a graph. A larger step runs for so long that its launches do not matter."""
MAX_PREFILLS = 32
"""Sequences of a mixed step that may have a query tile which is not full."""


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

    @property
    def num_sampled_adapter_tiles(self) -> int:
        """Tiles of sampling tokens with an adapter."""
        return min(self.num_seqs, self.num_adapter_tiles)

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
        )


def bucket_sizes(max_num_seqs: int) -> list[int]:
    """Return the batch sizes with a graph: 1, 2, 4, 8, then multiples of 16 up to 256, then of 32.

    The last one is the first that holds `max_num_seqs`.
    """
    sizes = [1, 2, 4, 8, *range(16, 257, 16), *range(288, max(max_num_seqs, 256) + 32, 32)]
    return sizes[: bisect_left(sizes, max_num_seqs) + 1]


class GraphShapes:
    """The shapes of a runner's graphs: of steps in which every sequence decodes, and of all other steps."""

    def __init__(self, max_num_seqs: int, max_num_tokens: int, *, has_adapters: bool) -> None:
        """max_num_tokens: of a step."""
        rows = bucket_sizes(max_num_seqs)
        self.max_rows = rows[-1]
        decode = [StepShape(size, size) for size in rows]
        mixed = [
            StepShape(tokens, min(tokens, self.max_rows), tokens // QUERY_TILE + min(tokens, MAX_PREFILLS))
            for tokens in _mixed_tokens(max_num_tokens)
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
        return sorted(shapes, key=lambda shape: (-shape.num_tokens, -shape.num_adapter_tiles))

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


def pad_step(step: StepInputs[Ints], shape: StepShape) -> StepInputs[Ints]:
    """Append padding to a packed step up to a shape that holds it.

    Padding tokens store nothing. Padding sequences have no token. Padding rows of attention name sequence -1, which
    the kernels skip. Padding rows of sampling sample greedily after the first token.
    """
    more_seqs = shape.num_seqs - len(step.context_lens)
    more_tokens, more_rules = shape.num_tokens - len(step.token_ids), shape.num_seqs - len(step.rules)
    rules = np.zeros((more_rules, len(RULE_COLUMNS)), np.int32)
    rules[:, -1] = -1
    return replace(
        step,
        token_ids=np.pad(step.token_ids, (0, more_tokens)),
        positions=np.pad(step.positions, (0, more_tokens)),
        slots=np.pad(step.slots, (0, more_tokens), constant_values=-1),
        query_starts=np.pad(step.query_starts, (0, more_seqs), mode="edge"),
        context_lens=np.pad(step.context_lens, (0, more_seqs)),
        decoding=np.pad(step.decoding, (0, shape.num_seqs - len(step.decoding)), constant_values=-1),
        tiles=_more_rows(step.tiles, shape.num_tiles, -1),
        sampling=np.pad(step.sampling, (0, shape.num_seqs - len(step.sampling))),
        rules=np.concatenate((step.rules, rules)),
        adapter_tiles=_more_rows(step.adapter_tiles, shape.num_adapter_tiles, 0),
        sampled_adapter_tiles=_more_rows(step.sampled_adapter_tiles, shape.num_sampled_adapter_tiles, 0),
    )


def _more_rows(rows: Ints, count: int, value: int) -> Ints:
    return np.pad(rows, ((0, count - len(rows)), (0, 0)), constant_values=value)


def blank_step(shape: StepShape) -> StepInputs[Ints]:
    """Return a step of nothing but padding."""
    widths = {"tiles": 2, "rules": len(RULE_COLUMNS), "adapter_tiles": 3, "sampled_adapter_tiles": 3, "block_tables": 1}
    sizes = {field.name: (0, widths[field.name]) if field.name in widths else 0 for field in fields(StepInputs)}
    arrays = {name: np.zeros(size, np.int32) for name, size in sizes.items()}
    return pad_step(StepInputs(**arrays | {"query_starts": np.zeros(1, np.int32)}), shape)
