"""Open the engine that suits a model: for text that is generated, or for whole texts that an encoder computes."""

from __future__ import annotations

from collections.abc import Callable

from penstock.gpu_node.engine.config import EngineConfig
from penstock.gpu_node.engine.encoder.engine import EncoderEngine
from penstock.gpu_node.engine.engine import Engine


def open_engine(config: EngineConfig, progress: Callable[[str, float], None]) -> Engine | EncoderEngine:
    """Load the model that a config names into its engine. Raises ConfigError."""
    from penstock.gpu_node.model.architecture.encoders import EncoderFoundError

    try:
        return Engine(config, progress=progress)
    except EncoderFoundError:
        return EncoderEngine(config, progress=progress)
