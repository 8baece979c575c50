"""penstock: LLM inference behind a message queue.

`Client` and `AsyncClient` submit jobs to the queue; `Engine` runs a model in this process, without one. The names below
are loaded when they are first used, so that `import penstock` costs next to nothing and needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.contract.errors import (
        BusyError,
        ConfigError,
        ConflictError,
        DamagedDataError,
        DamagedRecordError,
        ForbiddenError,
        GoneError,
        InvariantError,
        JobCancelledError,
        JobExpiredError,
        JobFailedError,
        NotConfirmedError,
        NotFoundError,
        NotOnDiskError,
        NotReplicatedError,
        PenstockError,
        PromptTooLongError,
        ProtocolVersionError,
        RequestError,
        ResultTimeoutError,
        StreamDivergedError,
        TooCostlyError,
        TooLargeError,
        UnauthorizedError,
        UnavailableError,
        UnsupportedDurabilityError,
        UnsupportedKindError,
    )
    from penstock.contract.job import JobOptions, Message, Priority, SubmitOptions
    from penstock.contract.output import (
        Choice,
        Chunk,
        Logprob,
        Outcome,
        PrefillProgress,
        QueuePosition,
        Result,
        TokenLogprobs,
        Usage,
    )
    from penstock.contract.sampling import SamplingOptions, SamplingParams, StructuredOutputs
    from penstock.contract.tasks import Detokenize, Detokenized, Embed, Embedding, Tokenize, Tokenized
    from penstock.contract.tenant import Terms
    from penstock.gateway.settings import GatewaySettings
    from penstock.gpu_node.engine.async_engine import AsyncEngine
    from penstock.gpu_node.engine.config import EngineConfig
    from penstock.gpu_node.engine.engine import Engine
    from penstock.gpu_node.engine.records import EngineStats, Generation, RequestStep, RequestTimings, StepOutput
    from penstock.gpu_node.rank import RankSettings
    from penstock.gpu_node.settings import NodeSettings
    from penstock.producer.batch.settings import CelerySettings
    from penstock.producer.client import AsyncClient, AsyncJob, Client, ClientSettings, ClientStats, Job
    from penstock.producer.client.many import GenerateOptions
    from penstock.producer.files.storage import FilesSettings
    from penstock.queue.broker.producer import JobStatus, ServedPool
    from penstock.runtime.logging import LogSettings
    from penstock.runtime.settings import KeySettings, RedisSettings, redis_url_of

__version__ = "0.1.0"

_HOMES = {
    "penstock.contract.errors": (
        *(
            "BusyError",
            "ConfigError",
            "ConflictError",
            "DamagedDataError",
            "DamagedRecordError",
            "ForbiddenError",
            "GoneError",
            "InvariantError",
        ),
        "JobCancelledError",
        *(
            "JobExpiredError",
            "JobFailedError",
            "NotConfirmedError",
            "NotFoundError",
            "NotOnDiskError",
            "NotReplicatedError",
            "PenstockError",
            "PromptTooLongError",
        ),
        *("ProtocolVersionError", "RequestError", "ResultTimeoutError", "StreamDivergedError", "TooCostlyError"),
        *(
            "TooLargeError",
            "UnauthorizedError",
            "UnavailableError",
            "UnsupportedDurabilityError",
            "UnsupportedKindError",
        ),
    ),
    "penstock.contract.job": ("JobOptions", "Message", "Priority", "SubmitOptions"),
    "penstock.contract.output": (
        *("Choice", "Chunk", "Logprob", "Outcome", "PrefillProgress", "QueuePosition", "Result", "TokenLogprobs"),
        "Usage",
    ),
    "penstock.contract.sampling": ("SamplingOptions", "SamplingParams", "StructuredOutputs"),
    "penstock.contract.tasks": ("Detokenize", "Detokenized", "Embed", "Embedding", "Tokenize", "Tokenized"),
    "penstock.contract.tenant": ("Terms",),
    "penstock.gateway.settings": ("GatewaySettings",),
    "penstock.gpu_node.engine.async_engine": ("AsyncEngine",),
    "penstock.gpu_node.engine.config": ("EngineConfig",),
    "penstock.gpu_node.engine.engine": ("Engine",),
    "penstock.gpu_node.engine.records": (
        *("EngineStats", "Generation", "RequestStep", "RequestTimings", "StepOutput"),
    ),
    "penstock.gpu_node.rank": ("RankSettings",),
    "penstock.gpu_node.settings": ("NodeSettings",),
    "penstock.producer.batch.settings": ("CelerySettings",),
    "penstock.producer.client": ("AsyncClient", "AsyncJob", "Client", "ClientSettings", "ClientStats", "Job"),
    "penstock.producer.client.many": ("GenerateOptions",),
    "penstock.producer.files.storage": ("FilesSettings",),
    "penstock.queue.broker.producer": ("JobStatus", "ServedPool"),
    "penstock.runtime.logging": ("LogSettings",),
    "penstock.runtime.settings": ("KeySettings", "RedisSettings", "redis_url_of"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

# Written out, as type checkers read it.
__all__ = [
    "AsyncClient",
    "AsyncEngine",
    "AsyncJob",
    "BusyError",
    "CelerySettings",
    "Choice",
    "Chunk",
    "Client",
    "ClientSettings",
    "ClientStats",
    "ConfigError",
    "ConflictError",
    "Detokenize",
    "Detokenized",
    "Embed",
    "Embedding",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "FilesSettings",
    "ForbiddenError",
    "GatewaySettings",
    "GenerateOptions",
    "Generation",
    "DamagedDataError",
    "DamagedRecordError",
    "GoneError",
    "InvariantError",
    "Job",
    "JobCancelledError",
    "JobExpiredError",
    "JobFailedError",
    "JobOptions",
    "JobStatus",
    "KeySettings",
    "LogSettings",
    "Logprob",
    "Message",
    "NodeSettings",
    "NotConfirmedError",
    "NotFoundError",
    "NotOnDiskError",
    "NotReplicatedError",
    "Outcome",
    "PenstockError",
    "PrefillProgress",
    "Priority",
    "PromptTooLongError",
    "ProtocolVersionError",
    "QueuePosition",
    "RankSettings",
    "RedisSettings",
    "RequestError",
    "RequestStep",
    "RequestTimings",
    "Result",
    "ResultTimeoutError",
    "SamplingOptions",
    "SamplingParams",
    "ServedPool",
    "StepOutput",
    "StreamDivergedError",
    "StructuredOutputs",
    "SubmitOptions",
    "Terms",
    "TokenLogprobs",
    "Tokenize",
    "Tokenized",
    "TooCostlyError",
    "TooLargeError",
    "UnauthorizedError",
    "UnavailableError",
    "UnsupportedDurabilityError",
    "UnsupportedKindError",
    "Usage",
    "__version__",
    "redis_url_of",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
