"""Sequences over KV blocks in which earlier sequences left their keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from fixtures.plans import Track, logits_of_step, plan_of
from fixtures.sampling import rows_of
from numpy.typing import NDArray

NUM_BLOCKS = 16
"""Blocks that a runner needs at least."""
_OWN, _OTHER, _COPY = [5, 9, 3], [2, 11, 7], 8
_TOKENS = np.random.default_rng(0).integers(0, 70, 200).tolist()


def logits_over(
    runner: Any, spoil: Callable[[Sequence[int]], None], *, block_size: int, length: int, chunk: int
) -> NDArray[np.float32]:
    """Return the logits of a prompt in chunks, beside a sequence that decodes, and of a fork that copies a block.

    `spoil` is called with the blocks before they are used. `length` is at most two blocks and a half.
    """
    spoil([*_OWN, *_OTHER, _COPY])
    prompt, decoding = Track(_TOKENS[:length], _OWN), Track(_TOKENS[100:], _OTHER)
    logits = []
    while prompt.left:
        logits += logits_of_step(runner, [(prompt, min(chunk, prompt.left)), (decoding, 1)])
    logits += logits_of_step(runner, [(decoding, 1)])
    num_full = length // block_size
    copies = [(_OWN[num_full], _COPY)] if length % block_size else []
    fork = Track([*prompt.token_ids, 4, 6], [*_OWN[:num_full], _COPY], length)
    runner.submit(plan_of([(fork, 1)], rows_of(1, temperature=0.0), copies)).result()
    fork.done += 1
    # The fork's last token may be the first of another block.
    fork.blocks = [*fork.blocks, 10]
    logits += logits_of_step(runner, [(fork, 1), (decoding, 1)])
    return np.concatenate(logits)
