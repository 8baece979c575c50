"""Float8 as transformers, vLLM and DeepSeek write it: `weight` in float8_e4m3fn, multiplied by its scales.

`weight_scale_inv` or `weight_scale` has one scale per matrix, per output, or per block of `weight_block_size` outputs
and inputs. Static activation scales (`input_scale`) are not used: activations stay unquantized or are scaled
dynamically. https://huggingface.co/docs/transformers/quantization/finegrained_fp8
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.gpu_node.model.checkpoint.files import FindStored, ReadScaled
from penstock.gpu_node.model.checkpoint.methods.parts import Method, Parts
from penstock.gpu_node.model.checkpoint.scaled_matrix import ScaledTensor

_FLOAT8 = "f8_e4m3"


def read_float8(parts: Parts, block: tuple[int, int] | None) -> ScaledTensor | None:
    """Return a matrix that is stored in float8; None for other matrices."""
    weight = parts.find("weight")
    if weight is None or weight.kind != _FLOAT8:
        return None
    part = "weight_scale_inv" if parts.find("weight_scale_inv") is not None else "weight_scale"
    rows, columns = weight.shape
    scales, group = parts.scales(part, (rows, columns), block)
    return ScaledTensor(parts.name, "fp8", weight.data, scales, None, group)


def _reader_of(settings: Mapping[str, Any]) -> ReadScaled:
    size = settings.get("weight_block_size")
    block = (int(size[0]), int(size[1])) if size else None

    def read(name: str, find: FindStored) -> ScaledTensor | None:
        return read_float8(Parts(name, find), block)

    return read


METHOD = Method("fp8", _reader_of)
