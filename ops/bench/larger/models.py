"""A model of a known shape with random weights: as a Hugging Face folder, and as a GGUF file in bfloat16.

The shapes and the numbers are those of `load_format` dummy, so activations keep their scale through all layers. The
tokenizer is the demo model's. Words without merges fill it up to the shape's vocabulary, so that each token has a text.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fixtures.gguf_sizes import add_sizes

from penstock.gpu_node.model.checkpoint.dummy import SHAPES

MODEL_SHAPES = {"1b": "llama-1b", "3b": "llama-3b"}
"""The names of `--model-shape`, and the shapes."""
_END_TOKEN = 2

Sizes = tuple[int, ...]


def tensors_of(config: Mapping[str, Any]) -> Iterator[dict[str, Sizes]]:
    """Names and shapes of a Llama's tensors: the layers, one after the other, then the rest."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries, keys = (config["head_dim"] * config[f"num_{kind}_heads"] for kind in ("attention", "key_value"))
    of_layer: dict[str, Sizes] = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    for i in range(config["num_hidden_layers"]):
        yield {f"model.layers.{i}.{name}.weight": sizes for name, sizes in of_layer.items()}
    # The head is the embedding.
    yield {"model.norm.weight": (hidden,), "model.embed_tokens.weight": (config["vocab_size"], hidden)}


def num_weights(config: Mapping[str, Any]) -> int:
    """Weights that each decoded token reads: all matrices, the embedding as the head."""
    sizes = [sizes for group in tensors_of(config) for sizes in group.values()]
    return sum(rows * columns for rows, columns in (shape for shape in sizes if len(shape) == 2))


def write_folder(shape: str, folder: Path) -> None:
    """Write a Hugging Face folder with a file for each layer."""
    import torch
    from safetensors.torch import save_file

    from penstock.gpu_node.model.checkpoint.dummy import RandomWeights

    config, random = SHAPES[MODEL_SHAPES[shape]], RandomWeights()
    folder.mkdir(parents=True)
    file_of: dict[str, str] = {}
    for i, group in enumerate(tensors_of(config)):
        file = f"model-{i:05}.safetensors"
        made = {
            name: torch.from_numpy(random.tensor(name, sizes)).view(torch.bfloat16).reshape(sizes)
            for name, sizes in group.items()
        }
        save_file(made, folder / file, {"format": "pt"})
        file_of |= dict.fromkeys(made, file)
    index = {"metadata": {"total_size": 2 * num_weights(config)}, "weight_map": file_of}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    write_texts(folder, config)


def write_texts(folder: Path, config: Mapping[str, Any]) -> None:
    """Write the config and a tokenizer with a text for each token."""
    from penstock.cli.demo_model import demo_model
    from penstock.gpu_node.model.checkpoint.source import resolve_model

    described = resolve_model(str(demo_model()), lambda _stage, _fraction: None).folder
    shutil.copytree(described, folder, dirs_exist_ok=True)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab |= {word: i for i, word in _words(len(vocab), config["vocab_size"])}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    (folder / "config.json").write_text(json.dumps({**config, "bos_token_id": None, "eos_token_id": _END_TOKEN}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": _END_TOKEN}))


def _words(first: int, end: int) -> Iterator[tuple[int, str]]:
    return ((i, f"Ġw{i}") for i in range(first, end))


def write_gguf(shape: str, path: Path) -> None:
    """Write the same model as llama.cpp's converter does, one tensor at a time."""
    import numpy as np
    from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter
    from gguf.tensor_mapping import get_tensor_name_map

    from penstock.gpu_node.model.checkpoint.dummy import RandomWeights

    config, random = SHAPES[MODEL_SHAPES[shape]], RandomWeights()
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    writer = GGUFWriter(path, "llama")
    _add_config(writer, config)
    _add_tokenizer(writer, config["vocab_size"])
    tensors = {name: sizes for group in tensors_of(config) for name, sizes in group.items()}
    for name, sizes in tensors.items():
        # Vectors are stored in float32.
        dtype, stored = (np.float32, None) if len(sizes) == 1 else (np.uint16, GGMLQuantizationType.BF16)
        num_bytes = int(np.prod(sizes)) * np.dtype(dtype).itemsize
        its_name = str(names.get_name(name, try_suffixes=(".weight",)))
        writer.add_tensor_info(its_name, sizes, np.dtype(dtype), num_bytes, stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, sizes in tensors.items():
        bits = random.tensor(name, sizes).view(np.uint16).reshape(sizes)
        if len(sizes) == 1:
            writer.write_tensor_data((bits.astype(np.uint32) << 16).view(np.float32))
            continue
        for part, kind in (("q_proj", "attention"), ("k_proj", "key_value")):
            if part in name:
                # llama.cpp rotates neighbors; Hugging Face rotates the halves of a head.
                bits = bits.reshape(config[f"num_{kind}_heads"], 2, -1, sizes[1]).swapaxes(1, 2).reshape(sizes)
        writer.write_tensor_data(np.ascontiguousarray(bits))
    writer.close()


def _add_config(writer: Any, config: Mapping[str, Any]) -> None:
    from gguf import LlamaFileType

    writer.add_file_type(LlamaFileType.MOSTLY_BF16)
    add_sizes(writer, config)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])


def _add_tokenizer(writer: Any, vocab_size: int) -> None:
    from gguf import GGUFReader, TokenType

    from penstock.cli.demo_model import demo_model

    fields = GGUFReader(demo_model()).fields
    values = {key.removeprefix("tokenizer.ggml."): field.contents() for key, field in fields.items()}
    tokens = values["tokens"]
    words = [word for _, word in _words(len(tokens), vocab_size)]
    writer.add_tokenizer_model(values["model"])
    writer.add_tokenizer_pre(values["pre"])
    writer.add_token_list([*tokens, *words])
    writer.add_token_types([*values["token_type"], *[TokenType.NORMAL] * len(words)])
    writer.add_token_merges(values["merges"])
    writer.add_add_bos_token(False)
    writer.add_eos_token_id(_END_TOKEN)
    writer.add_pad_token_id(_END_TOKEN)
    writer.add_chat_template(values["tokenizer.chat_template"])
