"""`penstock plan`: which numbers of ranks and replicas of a model fit these devices, without loading it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.options import options_of, takes
from penstock.cli.output import AsJson, write_line
from penstock.contract.errors import ConfigError
from penstock.gpu_node.gpus import GpuDevice, devices_here, gpu_problems, this_machine
from penstock.gpu_node.settings import NodeSettings, pool_of_model
from penstock.kernels.cpu.probe import available_bytes, usable_cores

if TYPE_CHECKING:
    from penstock.gpu_node.plan import Devices, ModelPlan, ShapeFit

_GIB = 1 << 30
_GPUS = re.compile(r"cuda|cuda:\d{1,3}(,cuda:\d{1,3})*")
_OF_NODE = (
    *("runner", "load_format", "dtype", "quantization", "kv_cache_dtype", "revision", "max_model_len"),
    *(
        "kv_cache_gib",
        "state_cache_gib",
        "block_size",
        "gpu_memory_utilization",
        "max_num_seqs",
        "max_num_batched_tokens",
    ),
)


@takes(*options_of(NodeSettings, _OF_NODE, flags={"runner": ("--runner", "--device")}))
def plan(
    model: Annotated[
        str,
        typer.Argument(
            envvar="PENSTOCK_NODE_MODEL",
            help="Folder, .gguf file or Hugging Face id; with --load-format dummy also a folder with a config.json "
            "alone, or a known shape. A model of the hub is downloaded first.",
        ),
    ],
    devices: Annotated[
        str,
        typer.Option(
            help="auto: this machine's GPUs, or else its CPU; cpu; cuda; some of its GPUs, such as cuda:0,cuda:1; or a "
            "number of GPUs, such as 8."
        ),
    ] = "auto",
    memory: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            help="GiB of each GPU, or of each process on the CPU. Default: what the GPUs have; on the CPU, the free "
            "memory for all together.",
        ),
    ] = None,
    cores: Annotated[int | None, typer.Option(min=1, help="CPU cores. Default: those of this machine.")] = None,
    tensor_parallel_size: Annotated[int | None, typer.Option(min=1, help="Consider only this size.")] = None,
    pipeline_parallel_size: Annotated[int | None, typer.Option(min=1, help="Consider only this size.")] = None,
    as_json: AsJson = False,
    **given: Any,
) -> None:
    """Say in which shapes a model fits devices: ranks (tensor x pipeline parallel), replicas, weights and KV cache.

    It reads the model's config and the headers of its files, loads nothing, and needs no GPU. Exit code 1 if nothing
    fits.

    Examples:
        penstock plan ORG/MODEL
        penstock plan model.gguf --devices cpu --memory 4
        penstock plan llama-8b --load-format dummy --devices 8 --memory 80
    """
    found = planned(
        {"model": model, **given}, devices, memory, cores, tensor=tensor_parallel_size, pipeline=pipeline_parallel_size
    )
    best = found.best
    if as_json:
        write_line(json.dumps(asdict(found) | {"best": None if best is None else asdict(best)}, indent=2))
    else:
        write_line("\n".join(lines_of(found)))
    if best is None:
        raise typer.Exit(1)


def planned(
    given: Mapping[str, Any],
    devices: str = "auto",
    memory_gib: float | None = None,
    cores: int | None = None,
    *,
    tensor: int | None = None,
    pipeline: int | None = None,
) -> ModelPlan:
    """Return the plan of a node with the given settings. Raises ConfigError, which names the setting or the option."""
    try:
        from penstock.gpu_node.plan import plan_of
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed: pip install 'penstock-llm[cpu]', or [gpu]") from error

    settings = NodeSettings.load(redis_url="unix://unused", **given)
    found = _devices(devices, memory_gib, cores, settings)
    if settings.runner == "auto":
        # Some defaults depend on what computes.
        settings = NodeSettings.load(redis_url="unix://unused", **{**given, "runner": found.kind})
    return plan_of(settings, found, tensor=tensor, pipeline=pipeline)


def _devices(words: str, memory_gib: float | None, cores: int | None, settings: NodeSettings) -> Devices:
    from penstock.gpu_node.plan import Devices

    each = None if memory_gib is None else int(memory_gib * _GIB)
    may_be_gpus = settings.runner == "auto" or settings.wants_gpu
    if words.isdecimal() and int(words) > 0:
        if not may_be_gpus:
            raise ConfigError(
                f"devices: {words} GPUs, but runner {settings.runner} computes on the CPU", param="devices"
            )
        if each is None:
            raise ConfigError("memory: give the GiB of each GPU, such as --memory 80", param="memory")
        return Devices("gpu", int(words), each)
    if words not in ("auto", "cpu") and not _GPUS.fullmatch(words):
        reason = "is neither auto, cpu, cuda, a list such as cuda:0,cuda:1 nor a number of GPUs"
        raise ConfigError(f"devices: {words!r} {reason}", param="devices")
    if words != "cpu" and may_be_gpus and (gpus := _gpus_here(words)):
        # A rank needs the same of each GPU, so the smallest one decides.
        return Devices("gpu", len(gpus), each or min(gpu.total_mib for gpu in gpus) << 20)
    if settings.wants_gpu or words not in ("auto", "cpu"):
        reason = "no GPU is usable here (penstock doctor); name some, such as --devices 8 --memory 80"
        raise ConfigError(f"devices: {reason}", param="devices")
    return Devices("cpu", cores or usable_cores(), each, available_bytes())


def _gpus_here(words: str) -> list[GpuDevice]:
    """Return the usable GPUs of this machine: all, or those that `words` names by their numbers."""
    machine = this_machine()
    if not machine.gpus or any(gpu_problems(machine)):
        return []
    gpus = list(devices_here())
    numbers = [int(word.partition(":")[2]) for word in words.split(",") if ":" in word]
    if missing := [number for number in numbers if number >= len(gpus)]:
        raise ConfigError(f"devices: there is no cuda:{missing[0]}; {len(gpus)} GPUs are visible", param="devices")
    return [gpus[number] for number in dict.fromkeys(numbers)] if numbers else gpus


def lines_of(found: ModelPlan) -> Iterator[str]:
    """Yield a plan for people: the model, then a line for each shape."""
    yield f"{pool_of_model(found.model)}: runner {found.runner}, {found.dtype}, quantization {found.quantization}"
    yield (
        f"{found.layers} layers, {found.heads} heads, {found.kv_heads} KV heads; weights {_size(found.weight_bytes)}; "
        f"KV cache {_size(found.kv_token_bytes)} per token; context {found.max_model_len:,} tokens"
    )
    if found.why:
        yield found.why
    if found.state_bytes:
        yield (
            f"states of recurrent layers {_size(found.state_bytes)} per sequence; {found.state_slots:,} slots, "
            f"{_size(found.state_slots * found.state_bytes)}, for {found.max_num_seqs:,} sequences and snapshots"
        )
    if found.window:
        of_window, of_text = found.window * found.window_token_bytes, found.kv_token_bytes - found.window_token_bytes
        yield (
            f"layers with windows keep {_size(found.window_token_bytes)} of this for the last {found.window:,} tokens, "
            f"{_size(of_window)} per sequence; the other layers keep {_size(of_text)} of each token"
        )
    yield ""
    yield f"  {'TP':>3} {'PP':>3} {'replicas':>8}  {'weights/rank':>12} {'KV cache/rank':>13} {'KV tokens/replica':>18}"
    for shape in found.shapes:
        mark = "*" if shape == found.best else " "
        head = f"{mark} {shape.tensor:>3} {shape.pipeline:>3} {shape.replicas:>8}"
        if shape.problem:
            yield f"{head}  does not fit: {shape.problem}"
        else:
            sizes = f"{_size(shape.weight_bytes):>12} {_size(shape.kv_bytes):>13}"
            yield f"{head}  {sizes} {shape.kv_tokens:>18,}"
    yield ""
    yield summary(found)


def summary(found: ModelPlan) -> str:
    """Return a plan in one line."""
    best = found.best
    if best is None:
        return f"{pool_of_model(found.model)} does not fit: {found.shapes[0].problem}"
    words = f"{pool_of_model(found.model)} fits as {_in_words(best)}: {_size(best.weight_bytes)} of weights"
    words += f" and {_size(best.kv_bytes)} of KV cache per rank, {best.kv_tokens:,} KV tokens per replica"
    return f"{words}; {found.why}" if found.why else words


def _in_words(shape: ShapeFit) -> str:
    replicas = "1 replica" if shape.replicas == 1 else f"{shape.replicas} replicas"
    ranks = shape.tensor * shape.pipeline
    if ranks == 1:
        return replicas
    return f"{replicas} of {ranks} ranks (TP {shape.tensor} x PP {shape.pipeline})"


def _size(num_bytes: int) -> str:
    for unit, size in (("GiB", _GIB), ("MiB", 1 << 20)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes / 1024:.1f} KiB"
