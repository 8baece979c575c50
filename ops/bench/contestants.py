"""The engines that are measured, and their settings: a further setting of an engine is one line of data here."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from bench import peers

Entry = Literal["process", "queue", "http"]
Kind = Literal["bf16", "quantized"]

CORES = sorted(os.sched_getaffinity(0))
NUM_CORES = len(CORES)
"""Each engine computes on all cores that we may use."""

IN_PROCESS = ("mix", "prefix", "long", "single", "poisson", "startup")
ONE_BY_ONE = ("long", "single", "startup")
SERVED = ("mix", "prefix", "single", "poisson", "startup")
NUM_ONE_BY_ONE = 6
"""Requests of the mix that an engine without batching is timed on; it would need minutes for all."""


@dataclass(frozen=True)
class Contestant:
    """One engine with one setting."""

    name: str
    module: str
    """Of bench.engines."""
    entry: Entry
    weights: str
    """A kind of bench.weights."""
    kind: Kind = "bf16"
    peer: str | None = None
    """Whose environment it needs; None: ours."""
    workloads: tuple[str, ...] = IN_PROCESS
    options: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    max_requests: int | None = None
    parts: tuple[str, ...] | None = None
    """Which parts of a workload it runs; None: all."""

    @property
    def is_ours(self) -> bool:
        """Whether it is penstock."""
        return self.name.startswith("penstock")

    @property
    def python(self) -> str:
        """What runs its module. Clients of servers run in our environment, so that they cost all servers the same."""
        found = peers.interpreter(self.peer) if self.peer and self.entry == "process" else None
        return str(found or sys.executable)

    @property
    def is_installed(self) -> bool:
        """Whether it can run here."""
        return self.peer is None or peers.interpreter(self.peer) is not None


PENSTOCK_VARIANTS: dict[str, tuple[Kind, dict[str, str]]] = {
    "bf16": ("bf16", {"dtype": "bfloat16", "quantization": "none", "kv_cache_dtype": "bfloat16"}),
    "bf16, KV int8": ("bf16", {"dtype": "bfloat16", "quantization": "none", "kv_cache_dtype": "int8"}),
    "Q4_1, KV int8": ("quantized", {"dtype": "auto", "quantization": "auto", "kv_cache_dtype": "int8"}),
    "int8, KV int8": ("quantized", {"dtype": "auto", "quantization": "int8", "kv_cache_dtype": "int8"}),
}
"""Fields of EngineConfig; the node's settings have the same names."""

TRANSFORMERS_WAYS: dict[str, dict[str, Any]] = {
    "one by one": {"way": "one_by_one"},
    "static 16": {"way": "static", "batch": 16},
    "continuous": {"way": "continuous", "config": {"page_size": 32, "num_blocks": 512, "max_batch_tokens": 512}},
}
"""The cache of its continuous batching holds the mix and not much more: each step costs by the size of all of it."""
KV_CACHE_GIB = 1
"""What every engine that sets memory aside may take, penstock's default."""

VLLM_OPTIONS = {"dtype": "bfloat16", "max_model_len": 8192, "max_num_seqs": 64}
VLLM_ENV = {
    "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, CORES)),
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    # vLLM's own advice for CPUs.
    "LD_PRELOAD": str(peers.FOLDER / "vllm" / "lib" / "libiomp5.so"),
}
OPENVINO_OPTIONS = {"cache_size": KV_CACHE_GIB, "max_num_seqs": 64, "enable_prefix_caching": True}
OPENVINO_KINDS: dict[str, tuple[Kind, str]] = {
    "bf16": ("bf16", "openvino-fp16"),
    "int8": ("quantized", "openvino-int8"),
    "int4": ("quantized", "openvino-int4"),
}
LLAMA_OPTIONS = {"n_ctx": 8192, "n_threads": NUM_CORES, "n_threads_batch": NUM_CORES}
LLAMA_ENV = {"LLAMA_CPP_LIB_PATH": str(peers.LLAMA_BUILD / "bin")}
LLAMA_KINDS: dict[str, tuple[Kind, str]] = {
    "bf16": ("bf16", "gguf-bf16"),
    "Q8_0": ("quantized", "gguf-q8_0"),
    "Q4_1": ("quantized", "gguf"),
}
LLAMA_SLOTS = 64
"""They share one cache as large as the workload needs: llama.cpp sets all of it aside when it starts."""


def _penstock() -> Iterator[Contestant]:
    in_process, served = (*IN_PROCESS, "tiny"), (*SERVED, "tiny")
    for name, (kind, fields) in PENSTOCK_VARIANTS.items():
        yield Contestant(f"penstock {name}", "penstock", "process", "ours", kind, None, in_process, fields)
        queued = ("mix", "single")
        yield Contestant(f"penstock-queue {name}", "penstock_queue", "queue", "ours", kind, None, queued, fields)
        serve = [sys.executable, "-m", "penstock", "serve", "{weights}", "--ephemeral", "--port", "{port}"]
        serve += ["--dtype", fields["dtype"]]
        env = {f"PENSTOCK_NODE_{field.upper()}": value for field, value in fields.items()}
        server = {"command": serve, "ready": "/ready", "env": env}
        yield Contestant(f"penstock-http {name}", "http_server", "http", "ours", kind, None, served, server)


def _transformers() -> Iterator[Contestant]:
    for name, options in TRANSFORMERS_WAYS.items():
        workloads = ("mix", "single") if name == "one by one" else ("mix",)
        most = NUM_ONE_BY_ONE if name == "one by one" else None
        yield Contestant(
            f"transformers {name}", "transformers", "process", "hf-bf16", "bf16", None, workloads, options, {}, most
        )


def _vllm() -> Iterator[Contestant]:
    yield Contestant("vllm", "vllm", "process", "hf-bf16", "bf16", "vllm", options=VLLM_OPTIONS, env=VLLM_ENV)
    flags = [word for key, value in VLLM_OPTIONS.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    python = str(peers.FOLDER / "vllm" / "bin" / "python")
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", "{weights}", "--port", "{port}", *flags]
    command += ["--disable-log-stats", "--disable-uvicorn-access-log"]
    served = {"command": command, "ready": "/health", "env": VLLM_ENV}
    yield Contestant("vllm-server", "http_server", "http", "hf-bf16", "bf16", "vllm", SERVED, served)


def _openvino() -> Iterator[Contestant]:
    for name, (kind, weights) in OPENVINO_KINDS.items():
        yield Contestant(f"openvino {name}", "openvino", "process", weights, kind, "openvino", options=OPENVINO_OPTIONS)


def _llamacpp() -> Iterator[Contestant]:
    for name, (kind, weights) in LLAMA_KINDS.items():
        yield Contestant(
            f"llamacpp {name}", "llamacpp", "process", weights, kind, "llamacpp", ONE_BY_ONE, LLAMA_OPTIONS, LLAMA_ENV
        )
        command = [
            str(peers.llama_binary("llama-server")),
            *(
                "--model",
                "{weights}",
                "--port",
                "{port}",
                "--threads",
                str(NUM_CORES),
                "--threads-batch",
                str(NUM_CORES),
            ),
            *("--parallel", str(LLAMA_SLOTS), "--ctx-size", "{context}", "--kv-unified", "--offline"),
        ]
        served = {"command": command, "ready": "/health"}
        yield Contestant(f"llamacpp-server {name}", "http_server", "http", weights, kind, "llamacpp", SERVED, served)


CONTESTANTS: dict[str, Contestant] = {
    one.name: one for group in (_penstock(), _vllm(), _openvino(), _llamacpp(), _transformers()) for one in group
}
