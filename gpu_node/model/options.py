"""The settings that a runner is built with, stated once. Imports no numpy, because commands read node settings."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from penstock.contract.adapters import AdapterName

_NVIDIA_DRIVER = Path("/dev/nvidiactl")
"""Exists where an NVIDIA driver is loaded. Reading settings must not import torch to ask it."""
DEFAULT_KV_CACHE_GIB = 1.0
"""On the CPU."""
_Number = TypeVar("_Number", int, int | None)


def for_device(on_cpu: _Number, on_gpu: _Number) -> Callable[[dict[str, Any]], _Number]:
    """Return the factory of a default that depends on what will compute: the setting `runner`, read before."""

    def default(settings: dict[str, Any]) -> _Number:
        runner = str(settings.get("runner"))
        return on_gpu if is_gpu(runner) or (runner == "auto" and _NVIDIA_DRIVER.exists()) else on_cpu

    return default


_RUNNERS = ("auto", "cpu", "native", "torch", "gpu", "transformers")
_GPU = re.compile(r"(?:gpu|cuda)(:\d{1,3})?")


def runner_name(given: str) -> str:
    """Return the name of a runner in one spelling. vLLM's users know the GPU's by its device: cuda, or cuda:1.

    Raises ValueError for another name.
    """
    if (gpu := _GPU.fullmatch(given)) is not None:
        return f"gpu{gpu[1] or ''}"
    if given not in _RUNNERS:
        raise ValueError(f"must be {', '.join(_RUNNERS)}, cuda, or a GPU by its number, such as cuda:1")
    return given


def is_gpu(runner: str) -> bool:
    """Return whether the runner of this name computes on a GPU, whichever one."""
    return runner.partition(":")[0] == "gpu"


def _number(value: object) -> object:
    """Return a number for the digits of an environment variable; pydantic compares literals as they are."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def _kv_cache_dtype(given: str) -> str:
    """Return the one name of each type: vLLM has three for an fp8 cache, and here all of them are fp8."""
    return "fp8" if given.startswith("fp8") else given


class RunnerSettings(BaseModel):
    """The settings of a runner that engines and nodes share; `EngineOptions` adds those of the engine.

    The KV cache holds `num_kv_blocks` blocks if that is set, else as many blocks as fit into `kv_cache_gib`. It never
    holds more than `max_num_seqs` sequences of full length could use. A host pool holds `num_swap_blocks` blocks, or as
    many as fit into `swap_space_gib`. It stores the blocks of preempted sequences, evicted prefixes, and the part of a
    sequence that exceeds the KV cache alone.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    runner: Annotated[str, AfterValidator(runner_name)] = "auto"
    """What computes the model. gpu or cuda: a CUDA GPU, cuda:1: the second of those that the process sees; native: C++
    kernels on the CPU; torch: PyTorch on the CPU; transformers: modules of that library on the CPU; cpu: native, else
    torch, or transformers if no family of ours is the model's. auto: a GPU if there is one, else as cpu."""
    cpu_isa: Literal["auto", "avx512", "avx512_vnni", "avx2"] = "auto"
    """Instruction set of the native kernels. auto: the fastest that this CPU has. Nodes continue each other's jobs if
    they compute the same bits: avx512_vnni and avx2 do, and all sets do with integer weights and a KV cache of int8 or
    float16. So a weaker set suits the stronger nodes of a mixed pool."""
    load_format: Literal["auto", "dummy"] = "auto"
    """dummy: random weights, of the shape in the model folder's config.json or of a known one: llama-8b, llama-3b,
    llama-1b, qwen3-0.6b, tiny. Without a tokenizer in that folder, tokens are bytes. auto: the weights of the model's
    files."""
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    """Compute type. The native runner has bfloat16 only. auto: the stored type if runner and machine support it,
    else float32; of an encoder bfloat16 if the native runner computes it."""
    quantization: Literal["auto", "none", "int8", "int8_group", "int4", "fp8"] = "auto"
    """Format of the weight matrices; auto: as stored. int8_group needs the native runner, fp8 needs a GPU."""
    kv_cache_dtype: Annotated[
        Literal["auto", "float32", "float16", "bfloat16", "int8", "fp8", "fp8_e4m3", "fp8_e5m2"],
        AfterValidator(_kv_cache_dtype),
    ] = "auto"
    """Type of the KV cache. native: bfloat16 (auto), float16 or int8, which it also takes for fp8; a GPU: its compute
    type (auto), int8 or fp8. fp8_e4m3 and fp8_e5m2 are taken as fp8, which is e4m3."""
    block_size: Annotated[Literal[8, 16, 32, 64], BeforeValidator(_number)] = 16
    """Tokens per KV block. With 8, torch computes on CPUs, several times slower; 64 is meant for GPUs."""
    kv_cache_gib: float | None = Field(default=None, gt=0.0)
    """Memory for the KV cache in GiB. Default: 1 on the CPU; on a GPU, what gpu_memory_utilization leaves."""
    num_kv_blocks: int | None = Field(default=None, ge=1)
    """Number of KV blocks, instead of a size in GiB."""
    swap_space_gib: float | None = Field(default=None, ge=0.0)
    """Host memory in GiB for preempted sequences, evicted prefixes and sequences larger than the KV cache. Default: 0;
    on a GPU whose KV cache has no set size 4, but at most a quarter of the free memory."""
    num_swap_blocks: int | None = Field(default=None, ge=0)
    """Number of KV blocks in host memory, instead of a size in GiB."""
    state_cache_gib: float | None = Field(default=None, gt=0.0, allow_inf_nan=False)
    """Memory in GiB for the states of recurrent layers, where a model has such layers. Default: that of the states of
    max_num_seqs sequences and of as many snapshots, but at most a quarter of the free memory; on a GPU, of what weights
    leave of gpu_memory_utilization. If the states of fewer sequences fit, max_num_seqs is lowered."""
    gpu_memory_utilization: float | None = Field(default=None, gt=0.0, le=1.0)
    """Fraction of the GPU's memory to use; the KV cache gets what weights, states and the largest step leave. Default:
    0.9."""
    cpu_offload_gib: float = Field(default=0.0, ge=0.0)
    """GiB of weights that stay in host memory and are streamed to the GPU in each step."""
    enforce_eager: bool = False
    """Run the steps of a GPU without CUDA graphs: they take longer, the node starts sooner, and the KV cache gets the
    graphs' memory. Steps on the CPU have no graphs."""
    deterministic: bool = False
    """Make a sequence's results on a GPU independent of the other sequences in its steps; not for int4 or fp8."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Maximum tokens of prompt and output together; default: the model's limit."""
    max_num_seqs: int = Field(default_factory=for_device(64, 256), ge=1)
    """Maximum sequences in one step. Default: 64; on a GPU 256."""
    max_num_batched_tokens: int = Field(default_factory=for_device(512, 8192), ge=1)
    """Maximum tokens in one step. Default: 512; on a GPU 8192."""
    lora_dir: Path | None = None
    """Folder of further LoRA adapters, each in a folder of its name; an adapter is loaded at its first request."""
    max_loras: int = Field(default=8, ge=1)
    """Maximum LoRA adapters in one step; a further adapter replaces the least recently used one."""
    max_lora_rank: int = Field(default=16, ge=1, le=512)
    """Maximum rank of a LoRA adapter."""
    num_threads: int | None = Field(default=None, ge=1)
    """CPU threads that compute the model; default: one per core that CPU affinity and quota allow."""
    tensor_parallel_size: int = Field(default=1, ge=1, le=64)
    """Ranks that compute each step together, each with a part of the weights and of the KV cache. They are processes.
    On the CPU they divide num_threads among themselves; on GPUs each has one of its own."""
    pipeline_parallel_size: int = Field(default=1, ge=1, le=64)
    """Stages of a pipeline, each with some of the layers; runner torch only. A single stream keeps one stage busy at a
    time."""
    rank_stall_s: float = Field(default=5.0, gt=0.0, allow_inf_nan=False)
    """Seconds for which a rank may stand still while all others wait for it. Then it counts as hung, and all of them
    are started again."""
    remote_ranks: int = Field(default=0, ge=0, le=63)
    """How many of the ranks, the last ones, run on other hosts and join with `penstock rank`; runner torch or gpu."""
    rank_address: str | None = None
    """HOST:PORT at which ranks of other hosts join: an address of one interface of this host."""
    rank_secret_file: Path | None = None
    """File with the secret that ranks of other hosts must know, of at least 16 bytes."""
    reserved_cores: int = Field(default=0, ge=0)
    """Cores to leave to other processes if num_threads is not set; at least one thread computes."""
    weight_cache: bool = True
    """Keep the native runner's packed weights in a cache file that all nodes of the machine map."""

    @property
    def wants_gpu(self) -> bool:
        """Whether the setting `runner` asks for a GPU."""
        return is_gpu(self.runner)

    @property
    def gpu_number(self) -> int | None:
        """The number of the GPU that the setting `runner` asks for, among those that the process sees; None: any."""
        number = self.runner.partition(":")[2]
        return int(number) if number else None

    @model_validator(mode="after")
    def _has_native_kernels(self) -> Self:
        if self.cpu_isa != "auto" and (is_gpu(self.runner) or self.runner in ("torch", "transformers")):
            raise ValueError(f"cpu_isa {self.cpu_isa}: runner {self.runner} does not use the native kernels")
        return self

    @field_validator("kv_cache_gib", "state_cache_gib", mode="before")
    @classmethod
    def _empty_is_unset(cls, given: Any) -> Any:
        """Treat an empty text as unset. Docker Compose passes a variable without a value as an empty text."""
        return None if given == "" else given


class RunnerOptions(RunnerSettings):
    """All settings that a runner is built with."""

    lease_ms: int = Field(default=15_000, ge=1)
    """Milliseconds without a sign of life of the engine's process after which the other ranks end."""
    state_slots: int = Field(default=0, ge=0)
    """Slots for the states of recurrent layers, each for one sequence; 0 for a model without such layers."""
    lora: dict[AdapterName, Path] = Field(default={})
    """LoRA adapters by name: folders in PEFT's format."""

    @property
    def num_adapter_slots(self) -> int:
        """Adapter slots of the runner; 0 if no adapters are configured."""
        return self.max_loras if self.lora or self.lora_dir is not None else 0

    @property
    def wanted_blocks(self) -> int | None:
        """Configured number of KV blocks; None leaves it to `kv_cache_gib`."""
        return self.num_kv_blocks
