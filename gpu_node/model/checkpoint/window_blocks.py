"""How the memory of a KV cache is divided between layers that see the whole text and layers with windows."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.gpu_node.model.cache_sizes import WindowSizes, blocks_of_window
from penstock.gpu_node.model.options import RunnerOptions

_TYPICAL_WINDOWS = 2
"""Memory that does not hold the windows of all sequences is divided for sequences that are so many windows long: then
both kinds of blocks are used up together."""


@dataclass(frozen=True, slots=True)
class WindowedTokens:
    """What a runner that keeps layers with windows apart has there of each token."""

    token_bytes: int
    window: int
    """The largest one, in tokens."""
    alignment: int
    """A step reads from the last multiple of this many tokens before the window on."""


@dataclass(frozen=True, slots=True)
class DividedBlocks:
    """The numbers of blocks of both kinds of layers."""

    num_whole: int
    windows: WindowSizes


def blocks_of_sequence(windowed: WindowedTokens, max_model_len: int, block_size: int) -> int:
    """Return the most blocks of windows that a sequence holds between two steps, and one for the rounding of a step."""
    of_window = blocks_of_window(windowed.window, windowed.alignment, block_size)
    return min(of_window, -(-max_model_len // block_size)) + 1


def divide_blocks(
    windowed: WindowedTokens, max_model_len: int, options: RunnerOptions, *, whole_token_bytes: int, num_bytes: int
) -> DividedBlocks | None:
    """Return the blocks of both kinds that `num_bytes` hold, or that `options.wanted_blocks` asks for.

    There are no more windows than those of max_num_seqs sequences, with the tokens of a step. None if that saves
    nothing, or if the memory does not hold one window: then all layers had better share their blocks.
    """
    size = options.block_size
    whole_bytes, window_bytes = size * whole_token_bytes, size * windowed.token_bytes
    each, of_text = blocks_of_sequence(windowed, max_model_len, size), -(-max_model_len // size)
    of_step = -(-options.max_num_batched_tokens // size)
    num_windows, num_whole = options.max_num_seqs * each + of_step, options.wanted_blocks
    if num_whole is None:
        typical = min(_TYPICAL_WINDOWS * each, of_text)
        num_seqs = (num_bytes - of_step * window_bytes) / (typical * whole_bytes + each * window_bytes)
        if num_seqs < 1:
            return None
        num_windows = min(num_windows, int(num_seqs * each) + of_step)
        num_whole = min((num_bytes - num_windows * window_bytes) // whole_bytes, options.max_num_seqs * of_text)
    if num_windows >= num_whole:
        return None
    return DividedBlocks(num_whole, WindowSizes(num_windows, window_bytes, windowed.window, windowed.alignment))
