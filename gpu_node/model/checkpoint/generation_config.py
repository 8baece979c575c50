"""The sampling that a model's authors recommend, in the file generation_config.json beside its weights."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from penstock.contract.errors import ConfigError
from penstock.contract.job import SamplingParams
from penstock.contract.problems import problem_of
from penstock.gpu_node.model.architecture.limits import MAX_DESCRIPTION_BYTES
from penstock.gpu_node.model.checkpoint.json_object import read_within

log = logging.getLogger(__package__)


FILE = "generation_config.json"
NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""The sampling options that a model may recommend. All others belong to a request."""
FROM_GGUF = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_p": "top_p",
    "general.sampling.top_k": "top_k",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
"""Metadata of a GGUF file, by their names in generation_config.json."""

Defaults = dict[str, int | float]


def sampling_defaults(setting: str, folder: Path) -> Defaults:
    """Return the options that a request gets if it does not set them.

    setting: `auto` for the file in the model's folder, `none`, the text of a JSON object, or the path of a file or of
    its folder. A value in the model's own file that no request may have is ignored, with a warning. Raises ConfigError
    for a wrong value anywhere else.
    """
    if setting == "none":
        return {}
    if setting == "auto":
        path = folder / FILE
        return _recommended(path) if path.is_file() else {}
    if setting.lstrip().startswith("{"):
        return _checked(_parsed(setting, "generation_config"), "generation_config")
    path = Path(setting).expanduser()
    path = path / FILE if path.is_dir() else path
    try:
        text = read_within(path, MAX_DESCRIPTION_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        reason = f"cannot read {path} ({why}); it must be auto, none, a path or a JSON object"
        raise ConfigError(f"generation_config: {reason}", param="generation_config") from None
    return _checked(_parsed(text, str(path)), str(path))


def _recommended(path: Path) -> Defaults:
    found: Defaults = {}
    try:
        given = _parsed(read_within(path, MAX_DESCRIPTION_BYTES).decode(), str(path))
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        log.warning("the model's generation_config.json is ignored", extra={"reason": str(error)})
        return found
    for name in NAMES:
        try:
            found |= _checked({name: given.get(name)}, str(path))
        except ConfigError as error:
            log.warning("a value in the model's generation_config.json is ignored", extra={"reason": str(error)})
    return found


def _parsed(text: str, source: str) -> dict[str, Any]:
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source} is not JSON: {error}", param="generation_config") from None
    if not isinstance(given, dict):
        raise ConfigError(f"{source} must be a JSON object", param="generation_config")
    return given


def _checked(given: dict[str, Any], source: str) -> Defaults:
    """Return the known options that are set. Raises ConfigError for a value that no request may have."""
    found = {name: given[name] for name in NAMES if given.get(name) is not None}
    try:
        params = SamplingParams.model_validate(found)
    except ValidationError as error:
        problem = problem_of(error)
        raise ConfigError(f"{source}: {problem.param}: {problem.message}", param="generation_config") from None
    return {name: getattr(params, name) for name in found}
