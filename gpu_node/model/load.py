"""A model's name and the engine's options to a runner that is ready to step."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.decoder import Decoder
from penstock.gpu_node.model.families import family_of
from penstock.gpu_node.model.linear import can_prepack
from penstock.gpu_node.model.protocol import LoadedModel, RunnerOptions
from penstock.gpu_node.model.revision import revision_of
from penstock.gpu_node.model.source import resolve_model
from penstock.gpu_node.model.spec import ModelSpec
from penstock.gpu_node.model.torch_runner import TorchRunner
from penstock.gpu_node.model.weights import load_weights, weight_files

_log = logging.getLogger(__name__)
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def load_model(model: str, options: RunnerOptions, progress: Callable[[str, float], None]) -> LoadedModel:
    """Find, check and load a model. Raises ConfigError naming what is missing or not supported."""
    if options.num_threads is not None:
        torch.set_num_threads(options.num_threads)
    folder = resolve_model(model, progress)
    config = _read_json(folder / "config.json")
    family = family_of(config)
    try:
        spec = family.spec_of(config)
    except KeyError as error:
        raise ConfigError(f"{folder}/config.json has no {error}") from error
    dtype = _choose_dtype(options.dtype, config)
    files = weight_files(folder)
    weights = load_weights(folder, spec, family.names, _DTYPES[dtype], lambda done: progress("load", done))
    max_model_len = _max_model_len(spec, options.max_model_len)
    num_blocks = _num_blocks(spec, options, max_model_len, _DTYPES[dtype])
    runner = TorchRunner(
        spec,
        Decoder(spec, weights, max_model_len),
        num_blocks=num_blocks + 1,
        block_size=options.block_size,
        dtype=_DTYPES[dtype],
    )
    prepacked, threads = can_prepack(_DTYPES[dtype]), torch.get_num_threads()
    _log.info("model loaded dtype=%s prepacked=%s kv_blocks=%d threads=%d", dtype, prepacked, num_blocks, threads)
    if torch.cuda.is_available():
        _log.warning("a CUDA device is visible, but this runner computes on the CPU")
    return LoadedModel(
        runner=runner,
        folder=folder,
        vocab_size=spec.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=_eos_token_ids(folder, config),
        dtype=dtype,
        revision=revision_of(folder, files, dtype),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ConfigError(f"there is no {path}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return content


def _choose_dtype(wanted: str, config: Mapping[str, Any]) -> str:
    """What was asked for; else the checkpoint's own where this CPU multiplies it well; else float32."""
    if wanted != "auto":
        return wanted
    stored = config.get("dtype") or config.get("torch_dtype") or "float32"
    capability = torch.backends.cpu.get_cpu_capability()
    fast = stored == "bfloat16" and torch.cpu._is_avx512_bf16_supported()
    chosen = stored if fast else "float32"
    _log.info("dtype auto: checkpoint=%s cpu=%s chosen=%s", stored, capability, chosen)
    return str(chosen)


def _max_model_len(spec: ModelSpec, wanted: int | None) -> int:
    if wanted is not None and wanted > spec.max_position:
        raise ConfigError(f"max_model_len {wanted} is more than the model's own limit of {spec.max_position} tokens")
    return wanted or spec.max_position


def _num_blocks(spec: ModelSpec, options: RunnerOptions, max_model_len: int, dtype: torch.dtype) -> int:
    """Blocks of the KV cache, without the null block."""
    if options.num_blocks is not None:
        return options.num_blocks
    token_bytes = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * dtype.itemsize
    affordable = int(options.kv_cache_gib * 2**30) // (token_bytes * options.block_size)
    useful = options.max_num_seqs * -(-max_model_len // options.block_size)
    if affordable < 1:
        raise ConfigError(f"kv_cache_gib {options.kv_cache_gib} does not hold one block of {options.block_size} tokens")
    return min(affordable, useful)


def _eos_token_ids(folder: Path, config: Mapping[str, Any]) -> frozenset[int]:
    """All ids that end a text, of generation_config.json or else config.json."""
    path = folder / "generation_config.json"
    generation = _read_json(path) if path.is_file() else {}
    eos = generation.get("eos_token_id")
    if eos is None:
        eos = config.get("eos_token_id")
    if eos is None:
        return frozenset()
    return frozenset(eos) if isinstance(eos, list) else frozenset((eos,))
