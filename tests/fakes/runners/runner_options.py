"""Options of a small runner."""

from __future__ import annotations

from typing import Any

from penstock.gpu_node.model.options import RunnerOptions

_SMALL: dict[str, Any] = {
    "runner": "torch",
    "dtype": "float32",
    "quantization": "auto",
    "kv_cache_dtype": "auto",
    "block_size": 16,
    "num_kv_blocks": 8,
    "kv_cache_gib": 1.0,
    "max_model_len": None,
    "max_num_seqs": 4,
    "num_threads": 1,  # more would wait for cores on which other tests compute
    "weight_cache": False,
}


def runner_options(**wanted: Any) -> RunnerOptions:
    """Return options of the torch runner: float32, eight blocks, no prefix cache, and the given changes."""
    return RunnerOptions(**_SMALL | wanted)
