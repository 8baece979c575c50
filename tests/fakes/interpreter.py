"""Triton's interpreter, mended: to a shorter float it drops the carry of a mantissa that rounds up, and it multiplies
matrices of bfloat16 by their bits."""

from __future__ import annotations

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
    module.GridExecutor.__call__ = np.errstate(all="ignore")(module.GridExecutor.__call__)


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
