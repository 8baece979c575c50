"""Triton's interpreter, mended and made faster.

It drops the carry of a mantissa that rounds up to a shorter float, multiplies matrices of bfloat16 by their bits, and
takes integers for the bits of bfloat16.
Without the changes of `_make_faster`, its bookkeeping takes four fifths of its time.
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
    module.GridExecutor.__call__ = np.errstate(all="ignore")(module.GridExecutor.__call__)
    module.InterpreterBuilder.create_si_to_fp = module.InterpreterBuilder.create_ui_to_fp = _float_of_integer
    module._patch_lang_tensor = _index_one_number(module._patch_lang_tensor)
    _make_faster(module)


def _index_one_number(patch: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Return a `_patch_lang_tensor` after which arrays of one number are indices. In 3.6, numpy 2.4 refuses them."""

    def patch_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    return patch_tensor


def _make_faster(module: Any) -> None:
    from triton.language import core

    language: Any = core
    # It patches `triton.language` at each call of a device function.
    module._patch_lang = _patch_once(module._patch_lang, module._LangPatchScope)
    module._patch_attr = _patch_attr_of(module.interpreter_semantic)
    module._get_np_dtype = _once_a_type(module._get_np_dtype)
    # It computes whether an integer overflows, for an assertion that is off.
    object.__setattr__(module.interpreter_builder.options, "sanitize_overflow", False)
    # Each result has a type of its own, whose shape is made of objects and checked anew.
    language.block_type.__init__ = _block_type_init(language)
    language.tensor.__init__ = _tensor_init(language)
    module.TritonSemantic.broadcast_impl_value = _broadcast_once(module.TritonSemantic.broadcast_impl_value)
    language._unwrap_if_constexpr = _unwrap_but(language.tensor, language._unwrap_if_constexpr)


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


def _patch_attr_of(semantic: Any) -> Callable[..., None]:
    """Return a `_patch_attr` whose members call the builtin itself, without the wrapper that looks for `_semantic`."""

    def patch_attr(target: Any, name: str, member: Any, _builder: Any, scope: Any) -> None:
        builtin = getattr(member, "__wrapped__", member)

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return builtin(*args, **kwargs)

        scope.set_attr(target, name, call)

    return patch_attr


def _block_type_init(language: Any) -> Callable[..., None]:
    """Return a `block_type.__init__` that checks each shape once."""
    checked: dict[tuple[int, ...], tuple[Any, int, str]] = {}
    check = language.block_type.__init__

    def init(block: Any, element_ty: Any, shape: Any) -> None:
        key = tuple([size.value if type(size) is language.constexpr else size for size in shape])
        if key not in checked:
            check(block, element_ty, shape)
            checked[key] = block.shape, block.numel, str(block.shape)
        block.shape, block.numel, shape_name = checked[key]
        block.element_ty, block.name = element_ty, f"<{shape_name}, {element_ty.name}>"

    return init


def _tensor_init(language: Any) -> Callable[..., None]:
    """Return a `tensor.__init__` that gives the tensors of one shape the same objects as shape and as size."""
    known: dict[int, tuple[Any, Any, Any]] = {}
    init_slowly = language.tensor.__init__

    def init(tensor: Any, handle: Any, of: Any) -> None:
        shape = of.shape if of.is_block() else None
        _, tensor.shape, tensor.numel = known.get(id(shape), (None, None, None))
        if tensor.shape is None:
            init_slowly(tensor, handle, of)
            # The shape is kept with its id, which no other object may get.
            known[id(shape)] = shape, tensor.shape, tensor.numel
        tensor.handle, tensor.type, tensor.dtype = handle, of, of.scalar

    return init


def _broadcast_once(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `broadcast_impl_value` that gives back two blocks of one shape, which is one object, as they are."""

    def broadcast_impl_value(semantic: Any, left: Any, right: Any) -> Any:
        if left.type.is_block() and right.type.is_block() and left.type.shape is right.type.shape:
            return left, right
        return broadcast(semantic, left, right)

    return broadcast_impl_value


def _unwrap_but(tensor: type, unwrap: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return an `_unwrap_if_constexpr` that gives back at once what is no constant."""
    plain = {tensor, int, bool, float}
    return lambda value: value if type(value) in plain else unwrap(value)


def _convert(data: NDArray[Any], source: Any, target: Any, _rounding: Any) -> NDArray[Any]:
    given, wanted = _FLOATS[source.name], _FLOATS[target.name]
    bits = torch.from_numpy(np.ascontiguousarray(data).view(np.uint8).copy()).view(given)
    return bits.to(wanted).view(torch.uint8).numpy().view(_BITS[wanted.itemsize]).reshape(data.shape)


def _float_of_integer(builder: Any, integers: Any, target: Any) -> Any:
    """Convert by way of float32: the interpreter takes the bits of a bfloat16 for an integer."""
    wanted = _FLOATS[target.scalar.name]
    if wanted.itemsize > 2 or wanted is torch.float16:
        return builder.cast_impl(integers, target)
    floats = torch.from_numpy(np.ascontiguousarray(integers.data).astype(np.float32)).to(wanted)
    bits = floats.view(torch.uint8).numpy().view(_BITS[wanted.itemsize]).reshape(integers.data.shape)
    return type(integers)(bits, target.scalar)


def _dot(_builder: Any, a: Any, b: Any, sums: Any, *_: Any) -> Any:
    left, right = (_wide(x) for x in (a, b))
    return type(a)(np.matmul(left, right, dtype=sums.data.dtype) + sums.data, sums.dtype.scalar)


def _wide(handle: Any) -> NDArray[Any]:
    if handle.dtype.scalar.name not in ("bf16", "fp8e4nv", "fp8e5"):
        data: NDArray[Any] = handle.data
        return data
    given = torch.from_numpy(np.ascontiguousarray(handle.data).view(np.uint8).copy())
    return given.view(_FLOATS[handle.dtype.scalar.name]).float().numpy().reshape(handle.data.shape)
