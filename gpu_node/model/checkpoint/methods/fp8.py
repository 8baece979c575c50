"""Float8 as transformers, vLLM and DeepSeek write it: `weight` in float8_e4m3fn, multiplied by its scales.

`weight_scale_inv` or `weight_scale` has one scale per matrix, per output, or per block of `weight_block_size` outputs
and inputs. Static activation scales (`input_scale`) are not used: activations stay unquantized or are scaled
dynamically. https://huggingface.co/docs/transformers/quantization/finegrained_fp8
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.gpu_node.model.checkpoint.methods.parts import Method, Parts, read_float8
from penstock.gpu_node.model.checkpoint.scaled_matrix import ScaledTensor
from penstock.gpu_node.model.checkpoint.stored_kinds import FindStored, ReadScaled


def _reader_of(settings: Mapping[str, Any]) -> ReadScaled:
    size = settings.get("weight_block_size")
    block = (int(size[0]), int(size[1])) if size else None

    def read(name: str, find: FindStored) -> ScaledTensor | None:
        return read_float8(Parts(name, find), block)

    return read


METHOD = Method("fp8", _reader_of)
