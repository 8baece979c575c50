"""How llama.cpp's converter names and lays out a model's tensors, seen from Hugging Face's names.

https://github.com/ggml-org/llama.cpp/tree/master/conversion
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from math import prod
from typing import Any, TypeAlias

import numpy as np
from gguf.constants import MODEL_ARCH_NAMES
from gguf.tensor_mapping import get_tensor_name_map
from numpy.typing import NDArray

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.checkpoint.expert_stacks import EXPERT
from penstock.gpu_node.model.checkpoint.gguf_file import GgufHeader
from penstock.gpu_node.model.checkpoint.row_orders import grouped_inputs

_BY_HEAD: Mapping[str, str] = {".q_proj.": "attention.head_count", ".k_proj.": "attention.head_count_kv"}
_IN_ORDER: Mapping[str, str] = {}
_INTERLEAVED_HEADS: Mapping[str, Mapping[str, str]] = {
    **dict.fromkeys(("llama", "granite", "granitehybrid", "smollm3", "nemotron_h", "nemotron_h_moe"), _BY_HEAD),
    **dict.fromkeys(("qwen2", "qwen3", "qwen3moe", "phi3", "olmo2", "gemma2", "gemma3", "gpt-oss"), _IN_ORDER),
    **dict.fromkeys(("qwen2vl", "qwen3vl", "qwen3vlmoe", "gemma4", "gpt2", "cohere2"), _IN_ORDER),
    **dict.fromkeys(("bert", "nomic-bert", "modern-bert", "gemma-embedding"), _IN_ORDER),
    **dict.fromkeys(("qwen35", "qwen35moe", "qwen3next", "lfm2", "lfm2moe", "falcon-h1"), _IN_ORDER),
}
"""The supported GGUF architectures. For tensors with the two halves of each head interleaved: the part of the name
that selects them, and the metadata key with the number of heads, or of the heads of each layer."""
_NEMOTRON = (
    (r"^model\.(layers\.\d+\.mixer\.)(?!experts\.)", r"backbone.\1"),
    (r"\.mixer\.experts\.", ".mlp.experts."),
    (r"\.e_score_correction_bias$", ".e_score_correction.bias"),
)
_LFM2_MOE = ((r"^model\.(layers\.\d+\.feed_forward\.experts\.)", r"\1"), (r"\.expert_bias$", ".expert_bias.bias"))
_SHARED_ALONE = (
    (r"\.shared_mlp\.(gate|up)_linear\.", r".mlp.\1_proj."),
    (r"\.shared_mlp\.output_linear\.", ".mlp.down_proj."),
)
_SHARED_BESIDE_EXPERTS = (
    (r"\.shared_mlp\.(gate|up)_linear\.", r".mlp.shared_expert.\1_proj."),
    (r"\.block_sparse_moe\.experts\.", ".mlp.experts."),
)
"""Of Granite 4, whose MLP has another name in a file where a mixture of experts stands beside it."""
_RENAMED: Mapping[str, tuple[tuple[str, str], ...]] = {
    "lfm2moe": _LFM2_MOE,
    "bert": ((r"^bert\.", ""),),
    "nomic-bert": ((r"^nomic_bert\.", ""),),
    "modern-bert": ((r"^model\.", ""),),
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), _NEMOTRON),
}
"""Names that the converter changes before it maps them: patterns, and what takes their place."""
_RENAMED_IN_ALL = ((r"\.dt_bias$", ".dt_proj.bias"),)
_ALSO_NAMED = ((r"\.ssm_dt\.bias$", ".ssm_dt"),)
_OF_LFM2 = ((r"^token_embd_norm\.", "output_norm."),)
"""Names in files of other converters (Ollama's, and early ones of llama.cpp): patterns, and what takes their place."""
_DELTA_INPUT = re.compile(r"(blk\.\d+\.)attn_(qkv|gate)\.weight")
_FUSED_EXPERTS = re.compile(r"\.ffn_(gate|up)_exps\.")
_UNMAPPED = (
    (r"^model\.layers\.(\d+)\.router\.scale$", r"blk.\1.ffn_gate_inp.scale"),
    (r"^model\.layers\.(\d+)\.router\.per_expert_scale$", r"blk.\1.ffn_down_exps.scale"),
)
"""Names of Gemma 4 that the converter gives by itself."""

Shape: TypeAlias = tuple[int, ...]
_SHAPES: Mapping[str, Callable[[Shape], Shape]] = {
    **dict.fromkeys(("ssm_a", "ssm_d", "ssm_norm.weight"), lambda shape: (prod(shape),)),
    **dict.fromkeys(("ssm_conv1d.weight", "shortconv.conv.weight"), lambda shape: (shape[0], 1, prod(shape[1:]))),
    "ffn_gate_inp_shexp.weight": lambda shape: (1, prod(shape)),
}
"""Tensors in which the converter adds or leaves out sizes of 1, or divides a size, and their shapes elsewhere."""


class GgufNames:
    """The tensors of a GGUF file by Hugging Face's names. Raises ConfigError for an architecture without a family."""

    def __init__(self, header: GgufHeader) -> None:
        name = str(header.metadata.get("general.architecture"))
        if name not in _INTERLEAVED_HEADS:
            known = ", ".join(_INTERLEAVED_HEADS)
            raise ConfigError(f"architecture {name} is not supported in GGUF; supported: {known}")
        architecture = next(known for known, gguf_name in MODEL_ARCH_NAMES.items() if gguf_name == name)
        self._header, self._prefix = header, f"{name}."
        self._heads = {part: _heads(header, f"{name}.{key}") for part, key in _INTERLEAVED_HEADS[name].items()}
        self._renamed = (*_RENAMED_IN_ALL, *_RENAMED.get(name, ()))
        if name == "granitehybrid":
            self._renamed += _SHARED_BESIDE_EXPERTS if header.metadata.get(f"{name}.expert_count") else _SHARED_ALONE
        self._also_named = (*_ALSO_NAMED, *(_OF_LFM2 if name.startswith("lfm2") else ()))
        self._names: Any = get_tensor_name_map(architecture, _count(header, f"{name}.block_count"))

    def name_of(self, name: str) -> str | None:
        """Return the name in the file. It stacks the matrices of all experts in one tensor."""
        for pattern, theirs in _UNMAPPED:
            if re.search(pattern, name):
                return re.sub(pattern, theirs, name)
        name = EXPERT.sub(".experts.", name)
        for pattern, ours in self._renamed:
            name = re.sub(pattern, ours, name)
        found: str | None = self._names.get_name(name, try_suffixes=(".weight", ".bias"))
        return found

    def stored_name(self, gguf_name: str, tensors: Collection[str]) -> str | None:
        """Return the name under which one of a file's `tensors` has what this name means; None if none has it."""
        # The converter adds an ending to the names of tensors that have none.
        for known in (gguf_name, f"{gguf_name}.weight"):
            if known in tensors:
                return known
        others = (re.sub(pattern, theirs, gguf_name) for pattern, theirs in self._also_named)
        return next((one for one in others if one in tensors), None)

    def joined_inputs(self, gguf_name: str) -> tuple[str, NDArray[np.int32]] | None:
        """Return the tensor in which the first files of Qwen3-Next have this matrix, and its rows there.

        They have the inputs of a delta rule in one tensor, as Hugging Face's files do.
        """
        found = _DELTA_INPUT.fullmatch(gguf_name)
        if found is None or not self._prefix.startswith("qwen3next"):
            return None
        key_heads, key_dim, values = (
            _count(self._header, self._prefix + key) for key in ("ssm.group_count", "ssm.state_size", "ssm.inner_size")
        )
        order = grouped_inputs(key_heads, key_dim, values // key_heads)
        channels = 2 * key_heads * key_dim + values
        return f"{found[1]}ssm_in.weight", order[:channels] if found[2] == "qkv" else order[channels:]

    def shape_of(self, gguf_name: str, shape: Shape) -> Shape:
        """Return the shape of a tensor of the file as Hugging Face has it."""
        for suffix, changed in _SHAPES.items():
            if gguf_name.endswith(f".{suffix}"):
                return changed(shape)
        return shape

    def row_order_of(self, name: str, num_rows: int) -> NDArray[np.int32] | None:
        """Return the row order that undoes the interleaving of halves; None for a tensor in order.

        Row r of a head's first half is stored as row 2r of the head, row r of its second half as row 2r + 1.
        """
        num_heads = next((count for part, count in self._heads.items() if part in name), None)
        if num_heads is None:
            return None
        if num_rows % (2 * num_heads):
            raise ConfigError(f"{num_rows} rows do not divide into two halves for each of {num_heads} heads")
        return np.arange(num_rows, dtype=np.int32).reshape(num_heads, -1, 2).swapaxes(1, 2).ravel()


def half_of_experts(gguf_name: str) -> tuple[str, int] | None:
    """Return the tensor in which the gates and up projections of experts may lie together, and which half this is."""
    found = _FUSED_EXPERTS.search(gguf_name)
    if found is None:
        return None
    return _FUSED_EXPERTS.sub(".ffn_gate_up_exps.", gguf_name), ("gate", "up").index(found[1])


def _heads(header: GgufHeader, key: str) -> int:
    """Return a number of heads. Of a list for all layers it is the largest: those without attention have 0."""
    count = header.metadata.get(key)
    return max(count) if isinstance(count, list) and count else _count(header, key)


def _count(header: GgufHeader, key: str) -> int:
    count = header.metadata.get(key)
    if not isinstance(count, int) or count < 1:
        raise ConfigError(f"{key} of the metadata is {count!r} but must be a whole number of at least 1")
    return count
