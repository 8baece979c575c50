"""A check at loading: a module gives the same logits with our KV blocks as it does alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.gpu_node.model.protocol import NO_ROWS, NO_STATE, StepPlan, StepStates
from penstock.gpu_node.model.transformers_runner.attention import IMPLEMENTATION, UnsupportedModuleError
from penstock.gpu_node.model.transformers_runner.observed import Observed
from penstock.gpu_node.model.transformers_runner.packed import PackedModule

_LENGTHS = 19, 12
"""Tokens of the two texts."""
_FIRST_PARTS = 7, 11
"""Of these, the tokens of the first step. In the second one, the first text has a prompt part and the second one
decodes a token."""
_BLOCK_SIZE = 8
_MAX_ERRORS = {torch.float32: 0.01, torch.float16: 0.1, torch.bfloat16: 0.2}
"""Relative errors of logits. Modules that compute something else are wrong by about 1."""


def continues_by_tokens(module: Any, observed: Observed, dtype: torch.dtype) -> bool:
    """Return whether the module's recurrent layers continue a state by one token in a pass only.

    Raises UnsupportedModuleError for a module that gives other logits here than alone.
    """
    try:
        _require_agreement(module, observed, dtype, by_tokens=False)
    except UnsupportedModuleError:
        if not observed.states:
            raise
        # Some recurrences of transformers begin anew with each pass of several tokens.
        _require_agreement(module, observed, dtype, by_tokens=True)
        return True
    return False


@torch.inference_mode()
def _require_agreement(module: Any, observed: Observed, dtype: torch.dtype, *, by_tokens: bool) -> None:
    """Compute two short texts in two mixed steps, and compare their logits with those of the module alone.

    Raises UnsupportedModuleError if they differ: parts of a module may depend on more than a token's position and the
    keys, values and states before it.
    """
    texts = [(np.arange(length) * 37 + 11 * length) % min(observed.vocab_size, 1000) for length in _LENGTHS]
    packed = PackedModule(module, observed, 1 + 3 * len(texts), _BLOCK_SIZE, dtype, len(texts), by_tokens=by_tokens)
    begins, found = [0, 0], [list[Tensor](), list[Tensor]()]
    for ends in (_FIRST_PARTS, _LENGTHS):
        plan = _plan(texts, begins, list(ends))
        count = len(plan.token_ids)
        logits, _ = packed.compute(plan, np.arange(count), count)
        parts = torch.split(logits, [end - begin for begin, end in zip(begins, ends, strict=True)])
        for rows, part in zip(found, parts, strict=True):
            rows.append(part)
        begins = list(ends)
    if not observed.by_texts:
        module.set_attn_implementation("eager")
    try:
        for text, rows in zip(texts, found, strict=True):
            alone = module(input_ids=torch.from_numpy(text)[None], use_cache=False).logits[0].float()
            error = _error(torch.cat(rows), alone)
            if not error <= _MAX_ERRORS[dtype]:
                wrong = f"its logits with KV blocks differ from those of transformers alone by {error:.2g}"
                raise UnsupportedModuleError(f"{wrong} (relative to their size)")
    finally:
        if not observed.by_texts:
            module.set_attn_implementation(IMPLEMENTATION)


def _error(found: Tensor, expected: Tensor) -> float:
    size = (expected - expected.mean(dim=-1, keepdim=True)).norm()
    return float((found - expected).norm() / size.clamp(min=torch.finfo(torch.float32).tiny))


def _plan(texts: list[NDArray[np.int64]], begins: list[int], ends: list[int]) -> StepPlan:
    spans = [np.arange(begin, end) for begin, end in zip(begins, ends, strict=True)]
    ids = np.concatenate([text[span] for text, span in zip(texts, spans, strict=True)])
    counts = [len(span) for span in spans]
    none, slots = np.empty(0, np.int32), np.arange(len(texts), dtype=np.int32)
    return StepPlan(
        token_ids=ids.astype(np.int32),
        positions=np.concatenate(spans).astype(np.int32),
        query_starts=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
        context_lens=np.array(ends, np.int32),
        states=StepStates(slots if begins[0] else np.full_like(slots, NO_STATE), slots, none.reshape(0, 2)),
        block_tables=np.arange(1, 1 + 3 * len(texts), dtype=np.int32).reshape(len(texts), 3),
        sample_tokens=none,
        sampling=NO_ROWS,
    )
