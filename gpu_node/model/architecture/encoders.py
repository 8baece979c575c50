"""Which models are encoders: they compute whole texts at once, and generate none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.architecture.transformers_class import architecture_of, has_transformers, kind_of
from penstock.gpu_node.model.text_protocol import RowKind

_WITH_OFFSET = frozenset(("camembert", "data2vec-text", "longformer", "mpnet", "roberta", "roberta-prelayernorm")) | {
    *("xlm-roberta", "xlm-roberta-xl")
}
"""Values of `model_type` whose positions begin after that of the padding token."""
_ENCODERS = _WITH_OFFSET | {
    *("albert", "bert", "deberta", "deberta-v2", "distilbert", "electra", "ernie", "eurobert", "flaubert"),
    *("gte", "jina_embeddings_v3", "megatron-bert", "mobilebert", "modernbert", "nomic_bert", "rembert", "roformer"),
    *("squeezebert", "xlm"),
}
"""Values of `model_type` of encoders whose classes transformers has itself."""
_BIDIRECTIONAL = frozenset(("gemma3_text",))
"""Values of `model_type` of decoders that are encoders where their configs say `use_bidirectional_attention`."""
_CAUSAL = "ForCausalLM", "LMHeadModel"
_ROW_KINDS: Mapping[str, RowKind] = {"ForSequenceClassification": "labels", "ForTokenClassification": "token_labels"}
_HEADS_OF_TRAINING = "Model", "ForMaskedLM", "ForPreTraining"
"""Ends of the names of classes whose hidden states embed a text. Heads that only training needs are not loaded."""


class EncoderFoundError(ConfigError):
    """A model that was to generate text is an encoder."""

    def __init__(self, model: str, architecture: str, source: Any) -> None:
        """source: the model's files (ModelSource)."""
        super().__init__(f"{model} is an encoder ({architecture}) and generates no text; EncoderEngine computes it")
        self.source = source


def is_encoder(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json is that of an encoder."""
    kind = kind_of(config)
    is_one = kind in _BIDIRECTIONAL and config.get("use_bidirectional_attention") is True
    if (kind not in _ENCODERS and not is_one) or config.get("is_decoder"):
        return False
    return not architecture_of(config).endswith(_CAUSAL)


def row_kind_of(config: Mapping[str, Any]) -> RowKind:
    """Return what an encoder makes of a text. Raises ConfigError for a head that is not supported."""
    architecture = architecture_of(config)
    for end, kind in _ROW_KINDS.items():
        if architecture.endswith(end):
            return kind
    if architecture == "none" or architecture.endswith(_HEADS_OF_TRAINING):
        return "vectors"
    ends = ", ".join((*_HEADS_OF_TRAINING, *_ROW_KINDS))
    raise ConfigError(f"architecture {architecture} is not supported; of encoders, classes that end in {ends} are")


def encoder_class(config: Mapping[str, Any]) -> Any:
    """Return transformers' own class of an encoder with its head; code of a checkpoint is never run.

    Raises ConfigError if there is none.
    """
    if not has_transformers():
        raise ConfigError("encoders need torch: pip install 'penstock-llm[node]'", param="runner")
    import transformers
    from transformers.models.auto import modeling_auto as auto

    tables: Mapping[RowKind, Mapping[str, Any]] = {
        "vectors": auto.MODEL_MAPPING_NAMES,
        "labels": auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        "token_labels": auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    }
    name = tables[row_kind_of(config)].get(str(config["model_type"]))
    found = getattr(transformers, name, None) if isinstance(name, str) else None
    if found is None:
        version = transformers.__version__
        raise ConfigError(f"transformers {version} has no class of its own for architecture {architecture_of(config)}")
    return found


def num_positions(config: Mapping[str, Any]) -> int | None:
    """Return how many tokens an encoder can tell apart by their positions; None if its config does not say it."""
    names = "max_position_embeddings", "n_positions", "max_seq_len"
    found = next((value for name in names if type(value := config.get(name)) is int), None)
    if found is None or kind_of(config) not in _WITH_OFFSET:
        return found
    pad = config.get("pad_token_id")
    return found - (pad if type(pad) is int else 1) - 1
