"""Logits of transformers, and the error of other logits against them."""

from __future__ import annotations

from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

Logits = NDArray[np.float32]


def bfloat16_model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Return a new model of the checkpoint's weights rounded to bfloat16, which computes in `dtype`."""
    return deepcopy(_loaded(folder)).to(dtype)


def load_bfloat16_model(folder: Path) -> Any:
    """Return a new model of the checkpoint's weights rounded to bfloat16, of which nothing stays in memory."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


_loaded = lru_cache(maxsize=64)(load_bfloat16_model)
"""Several tests ask for each small model, and loading one takes 30 to 50 ms."""


@torch.inference_mode()
def logits_of(model: Any, token_ids: list[int]) -> Logits:
    """Return the logits after each token, [tokens, vocab]."""
    logits: Logits = model(torch.tensor([token_ids])).logits[0].float().numpy()
    return logits


def error_of(got: Logits, want: Logits) -> float:
    """Return the root mean square of the differences divided by the standard deviation of `want`."""
    return float(np.sqrt(np.square(got - want).mean() / np.square(want - want.mean(-1, keepdims=True)).mean()))
