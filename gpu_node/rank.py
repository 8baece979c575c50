"""Settings of `penstock rank`, and what it runs: a rank of a model whose rank 0 is on another host."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from penstock.runtime.settings import Settings


class RankSettings(Settings):
    """Settings of a rank. All others come from the node that it joins."""

    model_config = SettingsConfigDict(env_prefix="PENSTOCK_RANK_", extra="forbid", frozen=True)

    model: str = Field(min_length=1)
    """Folder, .gguf file or Hugging Face id of the model that the node serves."""
    join: str
    """HOST:PORT of the node, as its setting rank_address has it."""
    rank_secret_file: Path
    """File with the secret that the node has too, of at least 16 bytes."""
    runner: str | None = None
    """The GPU of this rank, such as cuda:1. Default: the first one, where the node's runner is gpu."""
    revision: str | None = None
    """Revision of a model on the Hugging Face hub."""
    num_threads: int | None = Field(default=None, ge=1)
    """CPU threads of this rank; default: one per core that CPU affinity and quota allow."""
    lora_dir: Path | None = None
    """Folder of LoRA adapters, with the names and contents that the node's folder has."""


def run_rank(settings: RankSettings) -> None:
    """Join a node as one of its ranks, and again whenever its ranks start again. Raises ConfigError."""
    from penstock.gpu_node.engine.served_model import compute_for

    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    own: dict[str, Any] = {"num_threads": settings.num_threads}
    if settings.runner is not None:
        own["runner"] = settings.runner
    if settings.lora_dir is not None:
        own["lora_dir"] = str(settings.lora_dir)
    compute_for(settings.join, settings.rank_secret_file, settings.model, settings.revision, own)
