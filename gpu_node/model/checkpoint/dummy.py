"""Models of random weights (`load_format` dummy), to serve, measure and test without a checkpoint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.architecture.families import text_config_of
from penstock.gpu_node.model.architecture.limits import checked_config
from penstock.gpu_node.model.checkpoint.conversion_cache import built_once
from penstock.gpu_node.model.checkpoint.json_object import read_object

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
_QWEN3: dict[str, Any] = _LLAMA | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": True,
}


def _sizes(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, head_dim: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }


SHAPES: Mapping[str, Mapping[str, Any]] = {
    "llama-8b": _LLAMA | _sizes(4096, 14_336, 32, 32, 8, 128),
    "llama-3b": _LLAMA | {"tie_word_embeddings": True} | _sizes(3072, 8192, 28, 24, 8, 128),
    "llama-1b": _LLAMA | {"tie_word_embeddings": True} | _sizes(2048, 8192, 16, 32, 8, 64),
    "qwen3-0.6b": _QWEN3 | _sizes(1024, 3072, 28, 16, 8, 128),
    "tiny": _LLAMA | {"vocab_size": 384, "max_position_embeddings": 2048} | _sizes(64, 128, 2, 4, 2, 16),
}
"""The names that `load_format` dummy accepts in place of a folder."""


_NUM_NORMALS = 8_388_593
"""Numbers that are drawn once; all matrices repeat them. A prime, so that rows of a matrix are not alike."""
_SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_VERSION = 2
"""Increased when the written files change, so that no node uses outdated ones."""


class RandomWeights:
    """Makes tensors in bfloat16 that keep the scale of activations: the same for the same name and shape."""

    def __init__(self) -> None:
        self._scaled: dict[int, NDArray[np.uint16]] = {}

    def tensor(self, name: str, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        """Return a tensor's bytes. Norms are 1 and biases 0; a matrix is normal with variance 1 / columns."""
        if len(shape) == 1:
            return _bfloat16(np.full(shape, 0.0 if name.endswith(".bias") else 1.0, np.float32)).view(np.uint8)
        columns, total = shape[-1], int(np.prod(shape))
        values = np.empty(total, np.uint16)
        # Tensors begin at different numbers.
        first, at = crc32(name.encode()) % _NUM_NORMALS, 0
        while at < total:
            part = self._numbers(columns, first, min(total - at, _NUM_NORMALS - first))
            values[at : at + len(part)] = part
            first, at = 0, at + len(part)
        return values.view(np.uint8)

    def _numbers(self, columns: int, first: int, count: int) -> NDArray[np.uint16]:
        """Return numbers of a matrix with so many columns. Those of large matrices are scaled all at once, and kept."""
        scale = np.float32(columns**-0.5)
        if count < _NUM_NORMALS // 8 and columns not in self._scaled:
            return _bfloat16(_normals()[first : first + count] * scale)
        if columns not in self._scaled:
            self._scaled[columns] = _bfloat16(_normals() * scale)
        return self._scaled[columns][first : first + count]


# Of one user: it has no key.
@cache
def _normals() -> NDArray[np.float32]:
    """Draw the numbers. They stay in memory, in 32 MiB: a process may make several models."""
    numbers = np.random.default_rng(0).standard_normal(_NUM_NORMALS, np.float32)
    numbers.flags.writeable = False
    return numbers


def dummy_folder(model: str) -> Path:
    """Return a folder with the config and a tokenizer of a model without weights.

    model: a folder with a config.json, or a name of `SHAPES`. A folder that has a tokenizer is returned itself. Else
    the tokenizer has the 256 bytes, which prompts are made of. The rest of the vocabulary are words, so that each
    sampled token has a text. Raises ConfigError for another name, or if the vocabulary is too small.
    """
    path = Path(model).expanduser()
    if (path / "config.json").is_file():
        if (path / "tokenizer.json").is_file():
            return path
        config: Mapping[str, Any] = read_object(path / "config.json")
        checked_config(config, path / "config.json")
        text: Mapping[str, Any] = checked_config(text_config_of(config), path / "config.json")
    elif model in SHAPES:
        config = text = SHAPES[model]
    else:
        known = ", ".join(SHAPES)
        raise ConfigError(f"load_format dummy: {model} is no folder with a config.json and none of {known}")
    least, vocab = 256 + len(_SPECIAL_TOKENS), text.get("vocab_size")
    if not isinstance(vocab, int) or vocab < least:
        raise ConfigError(f"load_format dummy: vocab_size is {vocab!r} but must be at least {least}")
    digest = hashlib.blake2b(json.dumps(config, sort_keys=True).encode(), digest_size=8).hexdigest()
    return built_once(f"dummy-{digest}-v{_VERSION}", lambda folder: _write(folder, config, vocab))


def _write(folder: Path, config: Mapping[str, Any], vocab_size: int) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True)
    known = *sorted(pre_tokenizers.ByteLevel.alphabet()), *_SPECIAL_TOKENS
    # Ġ is the space. No merge makes these words, so no prompt has them.
    words = (f"Ġ{i:x}" for i in range(len(known), vocab_size))
    vocab = {token: i for i, token in enumerate((*known, *words))}
    tokenizer: Any = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"eos_token": _SPECIAL_TOKENS[-1], "chat_template": _CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | names))
    (folder / "config.json").write_text(json.dumps(config))


def _bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to bfloat16, returned as its bits. values: finite."""
    return ((values.view(np.uint32) + np.uint32(0x8000)) >> 16).astype(np.uint16)
