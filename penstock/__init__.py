"""penstock: LLM inference behind a message queue.

The names below are loaded when they are first used, so that `import penstock` costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.contract.errors import PenstockError
    from penstock.contract.job import Choice, Chunk, Job, Message, Outcome, Priority, Result, SamplingParams, Usage
    from penstock.gpu_node.engine.engine import Engine
    from penstock.producer.client import AsyncClient, AsyncJob, Client

__version__ = "0.1.0"

__all__ = [
    "AsyncClient",
    "AsyncJob",
    "Choice",
    "Chunk",
    "Client",
    "Engine",
    "Job",
    "Message",
    "Outcome",
    "PenstockError",
    "Priority",
    "Result",
    "SamplingParams",
    "Usage",
    "__version__",
]

_HOMES = {
    "penstock.contract.errors": ("PenstockError",),
    "penstock.contract.job": (
        "Choice",
        "Chunk",
        "Job",
        "Message",
        "Outcome",
        "Priority",
        "Result",
        "SamplingParams",
        "Usage",
    ),
    "penstock.gpu_node.engine.engine": ("Engine",),
    "penstock.producer.client": ("AsyncClient", "AsyncJob", "Client"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
