"""The engine: turns prompts into tokens and text, many at once. No Redis, and no torch outside the model that it loads.

The exported names are imported at first use, so that reading settings does not load an engine.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.gpu_node.engine.config import EngineConfig
    from penstock.gpu_node.engine.engine import Engine
    from penstock.gpu_node.engine.records import EngineStats, Generation, ResumedChoice, StepOutput
    from penstock.gpu_node.model.protocol import RankStats

__all__ = ["Engine", "EngineConfig", "EngineStats", "Generation", "RankStats", "ResumedChoice", "StepOutput"]

_HOME_OF = {"Engine": "engine", "EngineConfig": "config"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME_OF.get(name, 'records')}"), name)
