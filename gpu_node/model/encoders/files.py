"""The files of sentence-transformers beside an encoder: its modules, limits, prompts, and the activation of scores."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, cast

import numpy as np

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.checkpoint.json_object import read_object, read_within
from penstock.gpu_node.model.checkpoint.mapped_file import MappedFile
from penstock.gpu_node.model.checkpoint.stored_kinds import StoredTensor
from penstock.gpu_node.model.checkpoint.stored_tensors import read_safetensors
from penstock.gpu_node.model.encoders.heads import Activation, DenseLayer, Floats, PoolingMode, ScoreActivation

log = logging.getLogger(__package__)

MODULES = "modules.json"
SETTINGS = "config_sentence_transformers.json"
LIMITS = "sentence_bert_config.json"
_POOLING_CONFIG = "config.json"
_DENSE_WEIGHTS = "model.safetensors"
_MAX_MODULES = 16
_MAX_LIST_BYTES = 1 << 20
_MODES: Mapping[str, PoolingMode] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "last",
}
"""Fields of a pooling's config, in the order in which their vectors are put one after another."""
_BY_NAME: Mapping[str, PoolingMode] = {
    **{mode: mode for mode in _MODES.values()},
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "lasttoken": "last",
}
_SIMILARITIES = "cosine", "dot", "euclidean", "manhattan"
_ACTIVATIONS: Mapping[str, Activation] = {
    "identity": "identity",
    "tanh": "tanh",
    "relu": "relu",
    "gelu": "gelu",
    "sigmoid": "sigmoid",
}
_MAX_PROMPTS, _MAX_PROMPT_CHARS = 256, 4096


@dataclass(frozen=True, slots=True)
class SentenceFiles:
    """What the files say of an encoder that embeds texts."""

    poolings: tuple[PoolingMode, ...]
    layers: tuple[DenseLayer, ...]
    normalizes: bool
    max_tokens: int | None
    """Most tokens of a text; None: as many as the model takes."""
    lowercases: bool
    prompts: Mapping[str, str]
    default_prompt: str | None
    similarity: str
    digest: bytes
    """Of the content of all these files."""


def read_sentence_files(folder: Path, hidden_size: int) -> SentenceFiles:
    """Read the files of sentence-transformers in a model's folder. None of them needs to be there.

    Raises ConfigError for a module that is not known, by its name, and for what a file must not say.
    """
    digest = hashlib.blake2b(digest_size=16)
    poolings, layers, normalizes = _head_of(folder, hidden_size, digest)
    limits, settings = _read(folder / LIMITS, digest), _read(folder / SETTINGS, digest)
    prompts, default = prompts_in(settings, folder / SETTINGS)
    similarity = settings.get("similarity_fn_name") or "cosine"
    if similarity not in _SIMILARITIES:
        found = f"similarity_fn_name is {str(similarity)[:100]!r}"
        raise ConfigError(f"{folder / SETTINGS}: {found} but must be one of {', '.join(_SIMILARITIES)}")
    return SentenceFiles(
        poolings=poolings,
        layers=tuple(layers),
        normalizes=normalizes,
        max_tokens=_max_tokens_of(limits, folder / LIMITS),
        lowercases=_flag(limits, "do_lower_case", folder / LIMITS),
        prompts=prompts,
        default_prompt=default,
        similarity=str(similarity),
        digest=digest.digest(),
    )


def _head_of(
    folder: Path, hidden_size: int, digest: hashlib.blake2b
) -> tuple[tuple[PoolingMode, ...], list[DenseLayer], bool]:
    """Return the poolings, the dense layers, and whether vectors are normalized. Raises ConfigError."""
    poolings, layers, normalizes = tuple[PoolingMode, ...](), list[DenseLayer](), False
    width = hidden_size
    if (folder / MODULES).is_file():
        digest.update(read_within(folder / MODULES, _MAX_LIST_BYTES))
    for kind, inner in _modules(folder):
        path = folder / inner
        if kind == "Pooling":
            if poolings or layers or normalizes:
                raise ConfigError(f"{folder / MODULES}: Pooling must be the only one, and follow the model")
            poolings = poolings_in(_read(path / _POOLING_CONFIG, digest), path / _POOLING_CONFIG)
            width = hidden_size * len(poolings)
        elif kind == "Dense":
            layer = _dense(path, digest, width)
            layers.append(layer)
            width = len(layer.weight)
        elif kind == "Normalize":
            normalizes = True
        if kind == "Dense" and (normalizes or not poolings):
            raise ConfigError(f"{folder / MODULES}: Dense must stand between Pooling and Normalize")
    if not poolings:
        log.info("no file names a pooling, so it is the mean of all tokens", extra={"folder": str(folder)})
        poolings = ("mean",)
    return poolings, layers, normalizes


def score_activation_of(config: Mapping[str, Any], path: Path) -> ScoreActivation:
    """Return what a cross-encoder makes a score of its number by: as its config.json says, or else a sigmoid."""
    inner = config.get("sentence_transformers")
    named = inner.get("activation_fn") if isinstance(inner, dict) else None
    named = named or config.get("sbert_ce_default_activation_function")
    if named is None:
        return "sigmoid"
    name = str(named).rpartition(".")[2].lower()
    if name not in ("identity", "sigmoid"):
        raise ConfigError(f"{path}: the activation of scores is {str(named)[:100]!r} but must be Identity or Sigmoid")
    return cast("ScoreActivation", name)


def _modules(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the kind and the folder of each module after the model itself."""
    path = folder / MODULES
    if not path.is_file():
        if (folder / "1_Pooling" / _POOLING_CONFIG).is_file():
            yield "Pooling", "1_Pooling"
        return
    listed = _read_list(path)
    for at, one in enumerate(listed):
        kind, inner = str(one.get("type") or "").rpartition(".")[2], one.get("path")
        if not isinstance(inner, str) or PurePosixPath(inner).is_absolute() or ".." in PurePosixPath(inner).parts:
            raise ConfigError(f"{path}: module {at} has path {str(inner)[:100]!r}, which must be a folder inside")
        if at == 0:
            if kind != "Transformer" or inner:
                raise ConfigError(
                    f"{path}: the first module must be a Transformer with an empty path, not {kind[:100]}"
                )
        elif kind in ("Pooling", "Dense", "Normalize"):
            yield kind, inner
        elif kind != "Dropout":
            known = "Transformer, Pooling, Dense, Normalize, Dropout"
            raise ConfigError(f"{path}: module {str(one.get('type'))[:100]!r} is not supported; supported: {known}")


def _read_list(path: Path) -> list[dict[str, Any]]:
    import json

    try:
        content = json.loads(read_within(path, _MAX_LIST_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, list) or not all(isinstance(one, dict) for one in content):
        raise ConfigError(f"{path} is not a list of modules")
    if not 0 < len(content) <= _MAX_MODULES:
        raise ConfigError(f"{path} has {len(content)} modules, but must have 1 to {_MAX_MODULES}")
    return content


def _read(path: Path, digest: hashlib.blake2b) -> dict[str, Any]:
    """Return the content of a file; nothing if it is not there."""
    if not path.is_file():
        return {}
    digest.update(path.name.encode() + path.read_bytes())
    return read_object(path)


def poolings_in(config: Mapping[str, Any], path: Path) -> tuple[PoolingMode, ...]:
    """Return the poolings that a module's config names, `mean` if it names none. Raises ConfigError."""
    if not _flag(config, "include_prompt", path, default=True):
        raise ConfigError(f"{path}: include_prompt false is not supported")
    if (named := config.get("pooling_mode")) is not None:
        names = named if isinstance(named, list) else [named]
        unknown = next((one for one in names if one not in _BY_NAME), None)
        if unknown is not None or not names:
            raise ConfigError(f"{path}: pooling_mode {str(unknown)[:100]!r} is not one of {', '.join(_BY_NAME)}")
        return tuple(_BY_NAME[one] for one in names)
    found = tuple(mode for name, mode in _MODES.items() if _flag(config, name, path))
    return found or ("mean",)


def _flag(config: Mapping[str, Any], name: str, path: Path, *, default: bool = False) -> bool:
    value = config.get(name)
    if not isinstance(value, bool | None):
        raise ConfigError(f"{path}: {name} is {str(value)[:100]!r} but must be true or false")
    return default if value is None else value


def _dense(folder: Path, digest: hashlib.blake2b, width: int) -> DenseLayer:
    """Read a dense layer, whose input has `width` numbers."""
    config, path = _read(folder / _POOLING_CONFIG, digest), folder / _DENSE_WEIGHTS
    name = str(config.get("activation_function") or "torch.nn.modules.activation.Tanh").rpartition(".")[2].lower()
    if name not in _ACTIVATIONS:
        found = f"activation_function {str(config.get('activation_function'))[:100]!r}"
        raise ConfigError(f"{folder}: {found} is not supported; supported: {', '.join(_ACTIVATIONS)}")
    if not path.is_file():
        raise ConfigError(f"there is no {path}; a dense layer in pickled weights, which can run code, is not read")
    file = MappedFile(path)
    digest.update(file.content.data)
    stored = dict(read_safetensors(path, file.content))
    missing = [one for one in ("linear.weight",) if one not in stored]
    if missing:
        raise ConfigError(f"{path} has no tensor {missing[0]}")
    weight = _float32(stored["linear.weight"])
    bias = _float32(stored["linear.bias"]) if "linear.bias" in stored else None
    if weight.ndim != 2 or weight.shape[1] != width or (bias is not None and bias.shape != weight.shape[:1]):
        found = f"linear.weight has shape {list(weight.shape)}"
        raise ConfigError(f"{path}: {found}, but its input has {width} numbers")
    return DenseLayer(weight, bias, _ACTIVATIONS[name])


def _float32(tensor: StoredTensor) -> Floats:
    """Return a stored tensor in float32."""
    return np.ascontiguousarray(tensor.to_float32(), dtype=np.float32)


def _max_tokens_of(limits: Mapping[str, Any], path: Path) -> int | None:
    found = limits.get("max_seq_length")
    if found is None:
        return None
    if type(found) is not int or not 1 <= found <= 1 << 22:
        raise ConfigError(f"{path}: max_seq_length is {str(found)[:100]!r} but must be a whole number from 1")
    return found


def prompts_in(settings: Mapping[str, Any], path: Path) -> tuple[Mapping[str, str], str | None]:
    """Return the prompts that a file has by name, and the name of the default one. Raises ConfigError."""
    given, default = settings.get("prompts") or {}, settings.get("default_prompt_name")
    if not isinstance(given, dict) or len(given) > _MAX_PROMPTS:
        raise ConfigError(f"{path}: prompts must be an object of at most {_MAX_PROMPTS} texts")
    for name, text in given.items():
        if not isinstance(text, str) or len(text) > _MAX_PROMPT_CHARS:
            raise ConfigError(f"{path}: prompt {name[:100]!r} must be a text of at most {_MAX_PROMPT_CHARS} characters")
    if default is not None and default not in given:
        raise ConfigError(f"{path}: default_prompt_name {str(default)[:100]!r} is not one of the prompts")
    return given, default
