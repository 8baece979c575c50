"""Compile every kernel for a generation of GPUs, without a GPU: call the public functions, and launch nothing.

A process of its own: the interpreter and the compiler exclude each other. `compile_all.py 90` prints one line a kernel.
With `--binaries`, the line also says what the machine code takes and uses. `--dependent`: as dependent launches.
`--known`: without compiling what known_programs.py has. `--record`: it then has the programs of this run.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.jit import JITFunction

from penstock.gpu_node.model.torch_common.layers import NoNorm, Norm
from penstock.kernels.arguments import Addend, PagedCache, StateRows
from penstock.kernels.triton import launches, layers, products, recurrent
from penstock.kernels.triton.blocks import multiply_blocks, quantize_blocks
from penstock.kernels.triton.copies import copy_blocks
from penstock.kernels.triton.decode_attention import MAX_SPLITS, decode_attention
from penstock.kernels.triton.experts import (
    ExpertChoice,
    ExpertMatrices,
    Routes,
    choose_experts,
    multiply_experts,
    sum_experts,
)
from penstock.kernels.triton.few_rows import multiply_few
from penstock.kernels.triton.int4 import multiply_int4
from penstock.kernels.triton.invariant import multiply_invariant
from penstock.kernels.triton.launches import dependent_launches
from penstock.kernels.triton.layers import embed
from penstock.kernels.triton.lora import add_lora
from penstock.kernels.triton.norms import add_norm, add_norm_quantized, norm_all_heads
from penstock.kernels.triton.prefill_attention import prefill_attention
from penstock.kernels.triton.sampler import RULE_COLUMNS, Marks, sample
from tests.kernels.triton.known_programs import KnownPrograms


class NoCard(DriverBase):
    """Names the GPU to compile for."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    @classmethod
    def is_active(cls) -> bool:
        return False

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return self._capability

    def get_current_stream(self, _device: int) -> int:
        return 0


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def _ints(*shape: int) -> torch.Tensor:
    return _empty(*shape, dtype=torch.int32)


def _real(*shape: int) -> torch.Tensor:
    return _empty(*shape, dtype=torch.float32)


def _cache(dtype: torch.dtype = torch.bfloat16, head_dim: int = 128, block_size: int = 16) -> PagedCache:
    values = [_empty(4, 8, block_size, head_dim, dtype=dtype).transpose(0, 1) for _ in "kv"]
    scales = [_empty(4, 8, block_size, dtype=torch.float32).transpose(0, 1) for _ in "kv"]
    return PagedCache(*values, *(scales if dtype.itemsize == 1 else ()), host_jump=1 << 40)


def _attend(attention: Callable[..., None], cache: PagedCache, *last: Any, width: int = 64, **rules: Any) -> None:
    q = _empty(4, 32, cache.k.shape[-1], dtype=cache.k.dtype if cache.k_scales is None else torch.bfloat16)
    if attention is prefill_attention:
        rules["rows"] = launches.prefill_rows(q.shape[-1], q.dtype, q.device)
    if rules.pop("sunk", False):
        rules["sinks"] = _real(q.shape[1])
    attention(q, q, cache, _ints(5), _ints(4), _ints(4, width), *last, scale=0.1, **rules)


def compile_doors(capability: int) -> None:
    """Every public function, as a model of Llama's size calls it."""
    # float8 from Ada on.
    formats = [torch.bfloat16, torch.int8, *([torch.float8_e4m3fn] if capability >= 89 else ())]
    for kept in formats:
        _attend(decode_attention, _cache(kept), _ints(4), 8)
        _attend(prefill_attention, _cache(kept), _ints(4, 2))
    ruled: dict[str, Any] = {"window": 512, "biases": _empty(32, 512, dtype=torch.float32)}
    _attend(decode_attention, _cache(), _ints(4), MAX_SPLITS)
    _attend(decode_attention, _cache(), _ints(4), 1, **ruled)
    for capped in (_cache(head_dim=256), *map(_cache, formats[1:])):
        _attend(decode_attention, capped, _ints(4), 8, cap=50.0)
        _attend(prefill_attention, capped, _ints(4, 2), cap=50.0)
    _attend(prefill_attention, _cache(), _ints(4, 2), **ruled)
    for wide in (_cache(head_dim=256), _cache(torch.float32, head_dim=256), _cache(block_size=64), _cache(head_dim=64)):
        _attend(decode_attention, wide, _ints(4), 8)
        _attend(prefill_attention, wide, _ints(4, 2))
    # Gemma 4's layers without windows.
    _attend(decode_attention, _cache(head_dim=512), _ints(4), 8)
    _attend(prefill_attention, _cache(head_dim=512), _ints(4, 2))
    for sunk in (_cache(head_dim=64), *map(_cache, formats[1:])):
        _attend(decode_attention, sunk, _ints(4), 8, window=128, sunk=True)
        _attend(prefill_attention, sunk, _ints(4, 2), window=128, sunk=True)
    _compile_layers(formats)
    _compile_products(formats[1:])
    _compile_experts(formats[1:])
    _compile_recurrent()
    marks = Marks(_ints(4, 128_256), _empty(4, 128_256, dtype=torch.float32))
    marks.add(_ints(9, 3))
    marks.allow_only(_ints(2), _ints(2, 4008))
    sample(_empty(4, 128_256), _ints(4, len(RULE_COLUMNS)), marks)
    # A vocabulary of one tile, so that sums over tiles are of one number.
    sample(_empty(4, 384), _ints(4, len(RULE_COLUMNS)), marks)
    copy_blocks(_empty(4, 65_536, dtype=torch.uint8), np.array([[1, 2]], np.int32), host_from=2, host_jump=1 << 40)


def _compile_layers(formats: list[torch.dtype]) -> None:
    embed(_ints(4), _ints(4), _empty(128_256, 4096), 1.0)
    x, residual, weight = _empty(4, 4096), _empty(4, 4096, dtype=torch.float32), _empty(4096)
    rms = Norm(weight, None, 1e-5)
    add_norm(residual, Addend(x), rms)
    add_norm(residual, None, Norm(weight, weight, 1e-5))
    add_norm(residual, Addend(x, replace(rms, offset=1.0), 0.5), NoNorm(torch.bfloat16))
    norm_all_heads(_empty(4, 48 * 128), rms, Norm(_empty(1024), None, 1e-5))
    layers.bound_logits(_empty(4, 128_256), 0.5, 30.0)
    for activation in layers.ACTIVATIONS:
        layers.activate(x, activation)
        layers.gate_mul(x, activation)
    layers.gate_mul(x, "silu", (7.0, 1.702))
    for kept in formats[1:]:
        add_norm_quantized(residual, Addend(x), rms, kept)
        layers.activate_quantized(_empty(4, 2 * 14_336), "silu", kept, gated=True)
    angles, norm = _empty(512, 64, dtype=torch.float32), _empty(128)
    for kept in formats:
        given = _empty(4, 48 * 128), _cache(kept), _ints(4), _ints(4), angles, angles
        layers.rotate_and_store(*given, q_norm=norm, k_norm=norm)
    wide, norm = (_real(512, 256), _real(512, 256)), _empty(512)
    given = _empty(4, 48 * 512), _cache(head_dim=512), _ints(4), _ints(4), *wide
    layers.rotate_and_store(*given, q_norm=norm, k_norm=norm, value_norm=True)


def _compile_products(formats: list[torch.dtype]) -> None:
    real = {"dtype": torch.float32}
    for rows in (1, 4, 16, 64, 512):
        x = _empty(rows, 4096)
        for kept in formats:
            q, scales = products.quantize_vectors(x, kept)
            products.multiply_scaled(q, scales, _empty(6144, 4096, dtype=kept), _empty(6144, **real), torch.bfloat16)
        for given in (x, x.float()):
            multiply_int4(given, _empty(6144, 2048, dtype=torch.uint8), _ints(6144, 128))
    for rows in (1, 4, 64):
        for outputs in (4096, 6144, 28_672):
            multiply_few(_empty(rows, 4096), _empty(outputs, 4096), None)
        multiply_few(_empty(rows, 14_336), _empty(4096, 14_336), _empty(4096))
    for x in (_empty(4, 4096), _empty(4, 4096, **real)):
        multiply_invariant(x, _empty(6144, 4096, dtype=x.dtype), _empty(6144, dtype=x.dtype))
    for rank in (16, 3 * 512):
        add_lora(_empty(4, 6144), _empty(4, 4096), _empty(3, rank, 4096), _empty(3, 6144, rank), _ints(2, 3))


def _compile_experts(formats: list[torch.dtype]) -> None:
    """The experts of gpt-oss, and those of Qwen3 in bytes; float8 with blocks."""
    for given in (
        ExpertChoice(4, normalized=True),
        ExpertChoice(8, 1, by_sigmoid=True, normalized=True, bias=_real(128)),
    ):
        choose_experts(_empty(4, 128), given, _ints(4), _empty(4) if given.num_shared else None)
    for rows in (1, 256, 4096):
        _multiply_experts_of(rows, formats)
    if torch.float8_e4m3fn in formats:
        for rows in (1, 64, 512):
            q, scales = quantize_blocks(_empty(rows, 4096))
            multiply_blocks(q, scales, _empty(6144, 4096, dtype=q.dtype), _real(32, 6144), None, torch.bfloat16)


def _multiply_experts_of(rows: int, formats: list[torch.dtype]) -> None:
    routes, shape = Routes(_ints(rows, 4), _real(rows, 4), _ints(4 * rows), _ints(33)), (32, 5760, 2880)
    x, bias = _empty(rows, 2880), _empty(32, 5760)
    halves = (*shape[:2], 1440)
    matrices = [
        (x, ExpertMatrices("plain", _empty(*shape), None, bias)),
        (x.float(), ExpertMatrices("plain", _real(*shape))),
        (x, ExpertMatrices("int4", _empty(*halves, dtype=torch.uint8), _ints(*shape[:2], 90))),
        (x, ExpertMatrices("mxfp4", *(_empty(*some, dtype=torch.uint8) for some in (halves, (*shape[:2], 90))), bias)),
        *((x.to(kept), ExpertMatrices("rows", _empty(*shape, dtype=kept), _real(*shape[:2]))) for kept in formats),
    ]
    if torch.float8_e4m3fn in formats:
        numbers = _empty(*shape, dtype=torch.float8_e4m3fn)
        matrices.append((x.to(numbers.dtype), ExpertMatrices("blocks", numbers, _real(32, 23, 5760))))
    for given, kept in matrices:
        scales = {"rows": _real(rows), "blocks": _real(rows, 23)}.get(kept.format)
        dtype = torch.float32 if given.dtype == torch.float32 else torch.bfloat16
        for gathers in (True, False):
            multiply_experts(given, kept, routes, dtype, gathers=gathers, x_scales=scales)
    sum_experts(_empty(4 * rows, 2880), routes)


def _recurrent_step(size: int, dim: int = 128, key_heads: int = 16, norm: torch.Tensor | None = None) -> None:
    """All kernels with states, of `size` sequences. norm: the weights of a norm behind the gates."""
    seqs, tiled, heads = _ints(size + 1), key_heads < 16, _real(16)
    rows = StateRows(_ints(2 * size), seqs, seqs[1:], seqs[1:], seqs, _ints(size, 2))
    x, weight, bias = _empty(2 * size, 8192), _real(4, 6144), _real(6144)
    recurrent.convolve(x, _real(9, 3, 6144), weight, bias, rows)
    given = _real(2 * size, (2 * key_heads + 16) * dim), _real(2 * size, 32), heads, heads
    recurrent.delta_rule(*given, _real(9, 16, dim, dim), rows, num_key_heads=key_heads, tiled=tiled)
    given = _real(2 * size, 16 * 64 + 2 * dim), _empty(2 * size, 48)[:, 8:24], heads, heads
    recurrent.scan(*given, heads, _real(9, 16, 64, dim), rows, num_groups=1)
    width = 128 if tiled else 2048
    recurrent.gate_outputs(_real(2 * size, 2048), x[:, 6144:], norm, x.dtype, width=width, eps=1e-6, norm_first=tiled)


def _compile_recurrent() -> None:
    """Delta rules of Qwen3.5, Mamba-2 of Granite 4 and Falcon-H1, short convolutions of LFM2."""
    _recurrent_step(4)
    _recurrent_step(4, key_heads=8, norm=_real(128))
    _recurrent_step(4, dim=256, norm=_real(2048))
    rows = StateRows(_ints(4), _ints(5), _ints(4), _ints(4), _ints(5), _ints(2, 2))
    recurrent.convolve(_empty(4, 3 * 2048), _real(9, 2, 2048), _real(3, 2048), None, rows, torch.bfloat16, gated=True)


def compile_steps() -> None:
    """Steps that differ in nothing but their sizes."""
    for size in (2, 16, 17, 63):
        _attend(decode_attention, _cache(), _ints(size), 8, width=size)
        _attend(prefill_attention, _cache(), _ints(size, 2), width=size)
        given = _empty(size, 48 * 128), _cache(), _ints(size), _ints(size), *(_empty(512, 64, dtype=torch.float32),) * 2
        layers.rotate_and_store(*given)
        add_norm(_empty(size, 4096, dtype=torch.float32), Addend(_empty(size, 4096)), Norm(_empty(4096), None, 1e-5))
        layers.gate_mul(_empty(size, 4096), "silu")
        _recurrent_step(size)
        routes = choose_experts(_empty(size, 128), ExpertChoice(4), _ints(size))
        sum_experts(_empty(4 * size, 2880), routes)
        plain = ExpertMatrices("plain", _empty(128, 256, 2880))
        multiply_experts(_empty(size, 2880), plain, routes, torch.bfloat16, gathers=True)
        marks = Marks(_ints(4, 128_256), _empty(4, 128_256, dtype=torch.float32))
        marks.add(_ints(size, 3))
        sample(_empty(size, 128_256), _ints(size, len(RULE_COLUMNS)), marks)


def binary_facts(cubin: bytes) -> dict[str, Any]:
    """What one program takes, and how often its machine code has each operation that tests ask for."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

    def output(tool: str, option: str, path: str) -> str:
        return subprocess.run([tools / tool, option, path], capture_output=True, text=True, check=True).stdout

    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = re.search(r"REG:(\d+) STACK:(\d+)", output("cuobjdump", "-res-usage", file.name))
        code = output("nvdisasm", "-c", file.name)
    assert usage is not None
    operations = Counter(
        re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9]+(?:\.[A-Z0-9]+)*)", code, re.M)
    )
    waits = _comes_first("ACQBULK", code) and _comes_first("PREEXIT", code)
    wanted = {name: count for name, count in operations.items() if name.split(".")[0] in OPERATIONS}
    return {"registers": int(usage[1]), "stack_bytes": int(usage[2]), "operations": wanted, "code_waits": waits}


def _comes_first(operation: str, code: str) -> bool:
    """Whether machine code has an operation before all accesses of global memory, branches and ends."""
    other = re.search(r"\b(?:LDG|STG|LDGSTS|ATOMG|ATOM|RED|REDG|UBLKCP|UTMALDG|BRA|EXIT)\b", code)
    return other is not None and 0 <= code.find(operation) < other.start()


OPERATIONS = ("HGMMA", "QGMMA", "HMMA", "LDGSTS", "LDL", "STL", "F2F")
"""Matrix products, loads to shared memory that nothing waits for, uses of local memory, and slow conversions."""


class Recorder:
    """Stands in for a launch: compiles, and prints what came of it."""

    def __init__(self, *, reads_binaries: bool, known: KnownPrograms) -> None:
        self.stage = "doors"
        self.reads_binaries = reads_binaries
        self._known = known
        self._run = JITFunction.run

    def record(self, function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        capability = triton.runtime.driver.active.get_current_device()
        function.device_caches[capability]  # Triton makes the entry at the first use, and then sets the compiler anew.
        function.compile = self._known.compile
        kernel = self._run(function, *args, grid=grid, warmup=True, **options)
        facts = {
            "stage": self.stage,
            "module": Path(function.fn.__code__.co_filename).stem,
            "kernel": function.fn.__name__,
            "sm": capability,
            **self._known.facts_of(kernel),
            "constants": {
                name: value for name, value in options.items() if name.isupper() and type(value) in (int, bool)
            },
            "dtype": str(args[0].dtype),
            **(binary_facts(kernel.asm["cubin"]) if self.reads_binaries else {}),
        }
        print(json.dumps(facts), flush=True)
        return kernel


def compile_dependents() -> None:
    """A few kernels with dependent launches; `--dependent` compiles all of them."""
    add_norm(_empty(4, 4096, dtype=torch.float32), Addend(_empty(4, 4096)), Norm(_empty(4096), None, 1e-5))
    layers.gate_mul(_empty(4, 4096), "silu")
    _attend(decode_attention, _cache(), _ints(4), 8)


def main() -> None:
    capability = int(sys.argv[1])
    known = KnownPrograms(capability, reads="--known" in sys.argv)
    recorder = Recorder(reads_binaries="--binaries" in sys.argv, known=known)

    def run(function: Any, *args: Any, **options: Any) -> Any:
        return recorder.record(function, *args, **options)

    JITFunction.run = run
    triton.runtime.driver.set_active(NoCard(capability))
    launches.architecture = lambda device: capability
    with dependent_launches(enabled="--dependent" in sys.argv):
        compile_doors(capability)
    if recorder.reads_binaries:
        return
    recorder.stage = "steps"
    compile_steps()
    recorder.stage = "dependents"
    with dependent_launches():
        compile_dependents()
    if "--record" in sys.argv:
        known.record()


if __name__ == "__main__":
    main()
