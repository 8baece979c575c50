"""One file per family of models; `family_of` finds the one that a checkpoint's config names."""

from collections.abc import Mapping
from typing import Any

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.families.llama import LLAMA
from penstock.gpu_node.model.spec import Family

_FAMILIES = {family.architecture: family for family in (LLAMA,)}


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a config.json. Raises ConfigError naming what is asked for and what is supported."""
    architectures = config.get("architectures") or ["none"]
    family = _FAMILIES.get(architectures[0])
    if family is None:
        raise ConfigError(f"architecture {architectures[0]} is not supported; supported: {', '.join(_FAMILIES)}")
    return family
