"""Triton's interpreter, mended and made faster.

It drops the carry of a mantissa that rounds up to a shorter float, and multiplies matrices of bfloat16 by their bits.
It patches `triton.language` at each call of a device function, which takes a third of its time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_FLOATS = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
}
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def mend() -> None:
    """Let torch convert between floats, rounding to nearest even; overflows give no warning, as on a GPU."""
    from triton.runtime import interpreter

    module: Any = interpreter
    module._convert_float = _convert
    module.InterpreterBuilder.create_dot = _dot
    module._patch_lang = _patch_once(module._patch_lang, module._LangPatchScope)
    module._get_np_dtype = _once_a_type(module._get_np_dtype)
    module.GridExecutor.__call__ = np.errstate(all="ignore")(module.GridExecutor.__call__)


def _patch_once(patch: Callable[[Any], Any], scope: Callable[[], Any]) -> Callable[[Any], Any]:
    """Return a `_patch_lang` that patches for each module once. It gives back an empty scope, so the patch stays."""
    patched: set[str] = set()

    def patch_new(function: Any) -> Any:
        if function.__module__ not in patched:
            patch(function)
            patched.add(function.__module__)
        return scope()

    return patch_new


def _once_a_type(dtype_of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a `_get_np_dtype` that keeps its answers by the name of the elements' type."""
    known: dict[str, Any] = {}

    def kept(given: Any) -> Any:
        name = given.scalar.name
        if name not in known:
            known[name] = dtype_of(given)
        return known[name]

    return kept


def _convert(data: NDArray[Any], source: Any, target: Any, _rounding: Any) -> NDArray[Any]:
    given, wanted = _FLOATS[source.name], _FLOATS[target.name]
    bits = torch.from_numpy(np.ascontiguousarray(data).view(np.uint8).copy()).view(given)
    return bits.to(wanted).view(torch.uint8).numpy().view(_BITS[wanted.itemsize]).reshape(data.shape)


def _dot(_builder: Any, a: Any, b: Any, sums: Any, *_: Any) -> Any:
    left, right = (_wide(x) for x in (a, b))
    return type(a)(np.matmul(left, right, dtype=sums.data.dtype) + sums.data, sums.dtype.scalar)


def _wide(handle: Any) -> NDArray[Any]:
    if handle.dtype.scalar.name not in ("bf16", "fp8e4nv", "fp8e5"):
        data: NDArray[Any] = handle.data
        return data
    given = torch.from_numpy(np.ascontiguousarray(handle.data).view(np.uint8).copy())
    return given.view(_FLOATS[handle.dtype.scalar.name]).float().numpy().reshape(handle.data.shape)
