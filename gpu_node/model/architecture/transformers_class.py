"""Which of transformers' classes computes a model, and what is said of an architecture that it does not know."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from typing import Any

from penstock.contract.errors import ConfigError

_WHOLE = "ForConditionalGeneration"
"""What the names of such classes end with."""
_UNLIKE_THEIR_TEXT_MODELS = ("PaliGemmaForConditionalGeneration",)
"""Each token of a prompt attends to the whole prompt, which no causal class computes."""


def architecture_of(config: Mapping[str, Any]) -> str:
    """Return the architecture that a config.json names, or `none`."""
    named = config.get("architectures")
    return str(named[0]) if isinstance(named, list) and named else "none"


def kind_of(config: Mapping[str, Any]) -> str | None:
    """Return the `model_type` that a config.json names, or None. Raises ConfigError for one that is no text."""
    kind = config.get("model_type")
    if kind is not None and not isinstance(kind, str):
        raise ConfigError("model_type must be a text")
    return kind


def has_transformers() -> bool:
    """Return whether transformers and torch are installed, without importing them."""
    return find_spec("transformers") is not None and find_spec("torch") is not None


# Of one user, or of our own code and files.
@cache
def causal_classes() -> dict[str, str]:
    """Return transformers' classes that generate text, and for each one the `model_type` of its config."""
    return {name: kind for kind, name in reversed(_classes_of_kinds().items())}


# Of one user, or of our own code and files.
@cache
def _classes_of_kinds() -> dict[str, str]:
    """Return these classes by the `model_type` of their configs. Some are those of several."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    return {str(kind): str(name) for kind, name in NAMES.items()}


def is_whole(name: str) -> bool:
    """Return whether a class is that of a whole model, which may have a text model inside."""
    return name.endswith(_WHOLE) and name not in _UNLIKE_THEIR_TEXT_MODELS


def text_kind_of(config: Mapping[str, Any]) -> str | None:
    """Return the `model_type` of the text model inside of a model; None for other models.

    config: the model's, or what `text_config_of` makes of it.
    """
    inner = config.get("text_config")
    kind = (inner if isinstance(inner, dict) else config).get("model_type")
    return kind if is_whole(architecture_of(config)) and isinstance(kind, str) else None


def computing_class(config: Mapping[str, Any]) -> str:
    """Return the name of the class that generates a model's text.

    Of a model for images or sounds, it is the class of the text model inside, if transformers has one.
    """
    architecture, kind = architecture_of(config), text_kind_of(config)
    return _classes_of_kinds().get(kind, architecture) if kind and has_transformers() else architecture


def is_known(architecture: str) -> bool:
    """Return whether transformers has a class that generates text by this name. Without torch, it computes none."""
    return has_transformers() and architecture in causal_classes()


def near_names(config: Mapping[str, Any]) -> str:
    """Return a text about an architecture without a family: whether transformers knows it, and names like it.

    It is empty without transformers.
    """
    if not has_transformers():
        return ""
    if is_known(computing_class(config)):
        return "; runner transformers may compute it"
    import transformers

    near = get_close_matches(architecture_of(config)[:200], causal_classes(), n=3)
    alike = f"; its names are like {', '.join(near)}" if near else ""
    text = f"; transformers {transformers.__version__} does not know it either{alike}"
    written = str(config.get("transformers_version") or "")[:20]
    if _numbers(written) > _numbers(transformers.__version__):
        text += f"; the config was written by transformers {written}, so a newer one may have it"
    return text


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())


def transformers_class(config: Mapping[str, Any]) -> Any:
    """Return the class that computes a model (`computing_class`). A checkpoint's own code is not found.

    Raises ConfigError if there is none.
    """
    architecture = computing_class(config)
    if not has_transformers():
        raise ConfigError("runner transformers needs torch: pip install 'penstock-llm[node]'", param="runner")
    if not is_known(architecture):
        raise ConfigError(
            f"architecture {architecture} is not one of transformers that generate text{near_names(config)}"
        )
    import transformers

    found = getattr(transformers, architecture, None)
    if found is None:
        raise ConfigError(f"transformers {transformers.__version__} cannot import its class {architecture}")
    return found
