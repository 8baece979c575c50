"""The engines that compute the larger models, each with the stored formats that it reads."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from bench import contestants
from bench.contestants import Contestant, Kind

FORMATS: dict[str, tuple[Kind, str, dict[str, str]]] = {
    "bf16": ("bf16", "hf-bf16", {"dtype": "bfloat16", "quantization": "none", "kv_cache_dtype": "bfloat16"}),
    "int8": ("quantized", "hf-bf16", {"dtype": "auto", "quantization": "int8", "kv_cache_dtype": "int8"}),
    "Q8_0": ("quantized", "q8_0.gguf", {"dtype": "auto", "quantization": "auto", "kv_cache_dtype": "int8"}),
    "Q4_K_M": ("quantized", "q4_k_m.gguf", {"dtype": "auto", "quantization": "auto", "kv_cache_dtype": "int8"}),
}
"""penstock's: kind, weights, and fields of EngineConfig."""
LLAMA_WEIGHTS = {"bf16": "bf16.gguf", "Q8_0": "q8_0.gguf", "Q4_K_M": "q4_k_m.gguf"}
BITS = {"bf16": 16, "int8": 8, "Q8_0": 8, "Q4_K_M": 4, "int4": 4}
"""By the last word of an engine's name. An engine without one computes in bfloat16."""

_SERVERS = ("penstock-http", "llamacpp-server")
_NOT_SERVED = ("bf16", "int8", "Q8_0")
ALL_PARTS = ("prompt", "batch")


def bits_of(name: str) -> int:
    """Bits of a weight in an engine's setting."""
    return BITS.get(name.rpartition(" ")[2], 16)


def _penstock() -> Iterator[Contestant]:
    for name, (kind, weights, fields) in FORMATS.items():
        options: dict[str, Any] = dict(fields)
        engine = Contestant(f"penstock {name}", "penstock", "process", weights, kind, None, ("larger",), options)
        yield engine
        if weights.endswith(".gguf"):
            first = {"BENCH_EMPTY_CACHE": "1"}
            yield replace(engine, name=f"penstock first load {name}", workloads=("load",), env=first)
        env = {f"PENSTOCK_NODE_{field.upper()}": value for field, value in fields.items()}
        command = [sys.executable, "-m", "penstock", "serve", "{weights}", "--ephemeral", "--port", "{port}"]
        server = {"command": [*command, "--dtype", fields["dtype"]], "ready": "/ready", "env": env}
        yield replace(
            engine, name=f"penstock-http {name}", module="http_server", entry="http", options=server, parts=("batch",)
        )


def _peers() -> Iterator[Contestant]:
    for one in contestants.CONTESTANTS.values():
        if one.peer not in ("vllm", "openvino", "llamacpp"):
            continue
        setting = one.name.rpartition(" ")[2]
        if one.peer == "llamacpp":
            # The demo model's own format is none of these models'.
            setting = "Q4_K_M" if setting == "Q4_1" else setting
            one = replace(one, name=f"{one.name.rpartition(' ')[0]} {setting}", weights=LLAMA_WEIGHTS[setting])
        parts = ALL_PARTS if one.entry == "process" else ("batch",)
        if one.module == "llamacpp":
            # It computes one stream at a time.
            parts = ("prompt",)
            if setting != "bf16":
                yield replace(one, name=f"llamacpp first load {setting}", workloads=("load",))
        yield replace(one, workloads=("larger",), parts=parts)


LARGER: dict[str, Contestant] = {one.name: one for group in (_penstock(), _peers()) for one in group}
LEFT_OUT = {"3b": ("openvino", "penstock int8", *(f"{server} {kind}" for server in _SERVERS for kind in _NOT_SERVED))}
"""Beginnings of the names of engines that a shape does without, to keep its table within minutes."""


def of_shape(shape: str) -> list[Contestant]:
    """The engines that compute a shape."""
    return [
        replace(one, workloads=tuple(f"{name}-{shape}" if name == "larger" else name for name in one.workloads))
        for one in LARGER.values()
        if not one.name.startswith(LEFT_OUT.get(shape, ("-",)))
    ]
