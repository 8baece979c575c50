"""Helpers for guides outside an engine."""

from __future__ import annotations

from penstock.gpu_node.engine.structured.compiler import GrammarCompiler
from penstock.gpu_node.engine.structured.guide import Guide, GuidedMasks

MAX_STEPS = 300
"""A step waits at most a tenth of a second for a mask."""


def mask_of(guides: GrammarCompiler, guide: Guide) -> GuidedMasks:
    """Return the mask after all tokens of a guide, in as many steps as it needs. A failed guide allows no token."""
    for _ in range(MAX_STEPS):
        masks = GuidedMasks([guide])
        guides.write(masks)
        masks.wait()
        if not masks.late:
            return masks
    raise TimeoutError("no mask")
