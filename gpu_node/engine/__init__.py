"""The engine: prompts to tokens and text, many at once. No Redis, and no torch outside the model it loads."""

from penstock.gpu_node.engine.config import EngineConfig
from penstock.gpu_node.engine.engine import Engine
from penstock.gpu_node.engine.records import EngineStats, Generation, ResumedChoice, StepOutput

__all__ = ["Engine", "EngineConfig", "EngineStats", "Generation", "ResumedChoice", "StepOutput"]
