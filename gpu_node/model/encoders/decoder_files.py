"""What the files of sentence-transformers say of a model that generates text and also embeds: pooling and prompts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from penstock.contract.errors import ConfigError
from penstock.contract.tasks import Pooling
from penstock.gpu_node.model.checkpoint.hub import POOLING_FILE
from penstock.gpu_node.model.checkpoint.json_object import read_object, read_within
from penstock.gpu_node.model.encoders.files import MODULES, SETTINGS, poolings_in, prompts_in
from penstock.gpu_node.model.encoders.heads import PoolingMode

_POOLINGS: Mapping[PoolingMode, Pooling] = {"mean": "mean", "last": "last", "cls": "cls"}
_UNSUPPORTED = "Dense"
_MAX_BYTES = 1 << 20


def decoder_pooling_of(folder: Path) -> Pooling:
    """Return the pooling of a decoder's embeddings; `mean` if no file names one.

    Raises ConfigError for another pooling than the engine has, and for a module that changes the pooled vector.
    """
    path = _pooling_path(folder)
    if not path.is_file():
        return "mean"
    modes = poolings_in(read_object(path), path)
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        named, known = ", ".join(modes), ", ".join(_POOLINGS)
        raise ConfigError(
            f"{path}: pooling {named} is not supported for a model that generates text; one of {known} is"
        )
    return _POOLINGS[modes[0]]


def decoder_prompts_of(folder: Path) -> tuple[Mapping[str, str], str | None]:
    """Return the prompts of a decoder's embeddings by name, and the name of the default one. Raises ConfigError."""
    path = folder / SETTINGS
    if not path.is_file():
        return {}, None
    return prompts_in(read_object(path), path)


def _pooling_path(folder: Path) -> Path:
    """Return the file about the pooling, in the folder that the list of modules names."""
    path = folder / MODULES
    if not path.is_file():
        return folder / POOLING_FILE
    try:
        listed = json.loads(read_within(path, _MAX_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    for one in listed if isinstance(listed, list) else ():
        kind = str(one.get("type") if isinstance(one, dict) else None).rpartition(".")[2]
        if kind == _UNSUPPORTED:
            raise ConfigError(f"{path}: module {kind} is not supported for a model that generates text")
        if kind == "Pooling" and (name := str(one.get("path"))) and Path(name).name == name:
            return folder / name / "config.json"
    return folder / POOLING_FILE
