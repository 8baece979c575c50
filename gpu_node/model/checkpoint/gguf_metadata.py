"""The metadata of a GGUF file, read by keys without the architecture's name, and the fields that all configs have."""

from __future__ import annotations

from typing import Any

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.checkpoint.gguf_file import GgufHeader
from penstock.gpu_node.model.checkpoint.gguf_tokenizer import TOKENIZER_LISTS, special_ids


class Metadata:
    """The metadata of an architecture."""

    def __init__(self, header: GgufHeader) -> None:
        self.all = header.metadata
        self.tensors = header.tensors
        self.architecture = str(self.all.get("general.architecture"))
        self._prefix = f"{self.architecture}."

    def number(self, key: str, default: float | None = None) -> Any:
        """Return a number; `default` if the file has none. Raises ConfigError for another value, or a missing one."""
        found = self.all.get(self._prefix + key, default)
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise ConfigError(f"{self._prefix}{key} of the metadata is {found!r} but must be a number")
        return found

    def optional(self, key: str) -> Any:
        """Return any value; None if the file has none."""
        return self.all.get(self._prefix + key)

    def of_layers(self, key: str, count: int) -> list[Any] | None:
        """Return the values for all layers; None if there is none, or one for all. Raises ConfigError."""
        found = self.all.get(self._prefix + key)
        if not isinstance(found, list):
            return None
        if len(found) < count or not all(isinstance(one, int) and one >= 0 for one in found):
            need = f"a whole number of at least 0 for each of {count} layers"
            raise ConfigError(f"{self._prefix}{key} of the metadata has {len(found)} values but must have {need}")
        return found[:count]

    @property
    def num_layers(self) -> int:
        """The layers, without those that only predict further tokens, which are skipped."""
        count = int(self.number("block_count")) - int(self.number("nextn_predict_layers", 0))
        if count < 1:
            raise ConfigError(
                f"{self._prefix}block_count of the metadata leaves {count} layers without predicting ones"
            )
        if f"blk.{count}.attn_norm.weight" in self.tensors and f"blk.{count}.nextn.eh_proj.weight" not in self.tensors:
            key = f"{self._prefix}nextn_predict_layers"
            raise ConfigError(f"{key} says that layer {count} predicts further tokens, but it has no blk.{count}.nextn")
        return count


def common_fields(metadata: Metadata) -> dict[str, Any]:
    """Return the fields of config.json that all models have."""
    number, num_layers = metadata.number, metadata.num_layers
    heads = number("attention.head_count")
    kv_heads = metadata.of_layers("attention.head_count_kv", num_layers)
    ids = special_ids(metadata.all).items()
    return {
        "vocab_size": number("vocab_size", _vocab_size(metadata)),
        "hidden_size": number("embedding_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": number("attention.head_count_kv", heads) if kv_heads is None else max(kv_heads),
        "max_position_embeddings": number("context_length"),
        "dtype": "bfloat16",
        "tie_word_embeddings": "output.weight" not in metadata.tensors,
        **{f"{name}_token_id": token_id for name, token_id in ids if token_id is not None},
    }


def _vocab_size(metadata: Metadata) -> int:
    embedding = metadata.tensors.get("token_embd.weight")
    return len(metadata.all[TOKENIZER_LISTS[0]]) if embedding is None else embedding.shape[0]
