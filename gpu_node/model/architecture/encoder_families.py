"""The families of encoders that runners of our own compute: from config.json to a spec."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.architecture.encoders import num_positions
from penstock.gpu_node.model.architecture.hf_config import Config, activation_of, kinds_of, layers_of, rope_of
from penstock.gpu_node.model.architecture.mlp import Mlp
from penstock.gpu_node.model.architecture.rope import DynamicScaling, LongScaling
from penstock.gpu_node.model.architecture.spec import Attention, EncoderParts, LayerSpec, ModelSpec

_PUBLISHED = "attn.Wqkv.weight", "attention.qkv_proj.weight", "attn_qkv.weight"
"""Ends of the names of queries, keys and values in published files of NomicBERT and GTE; the last one is that of GGUF.
"""

Names = Collection[str]
"""The names of a checkpoint's tensors: published files of some families have other ones than transformers' classes."""


def encoder_spec_of(
    config: Config, names: Names, of_decoders: Mapping[str, Callable[[Config], ModelSpec]]
) -> ModelSpec:
    """Return the spec of an encoder. Raises ConfigError that names what is not supported.

    config: as transformers' class of the config has it, with all defaults. of_decoders: the specs of types whose layers
    are those of a decoder's family.
    """
    kind = str(config["model_type"])
    if kind in of_decoders:
        spec = of_decoders[kind](config)
    elif (spec_of := _FAMILIES.get(kind)) is None:
        raise ConfigError(f"model_type {kind} is not supported; supported: {', '.join((*_FAMILIES, *of_decoders))}")
    else:
        spec = spec_of(config, names)
    if any(isinstance(rope.scaling, DynamicScaling | LongScaling) for rope in spec.ropes):
        raise ConfigError("RoPE scaling by the length of a text is not supported")
    return spec


def _bert(config: Config, base: str) -> ModelSpec:
    """BERT and its relatives: norms behind the sums, and vectors of positions and of types of tokens."""
    hidden, num_heads, layer = config["hidden_size"], config["num_attention_heads"], f"{base}.encoder.layer.{{layer}}."
    if config.get("embedding_size", hidden) != hidden:
        raise ConfigError(f"embedding_size {config['embedding_size']} is not supported: it must be hidden_size")
    if (form := config.get("position_embedding_type", "absolute")) != "absolute":
        raise ConfigError(f"position_embedding_type {form!r} is not supported; supported: absolute")
    attention, inner = layer + "attention.", layer + "attention.self."
    # RoBERTa and its relatives count positions from the one behind that of the padding token.
    positions, types = _positions_of(config), config["type_vocab_size"]
    return ModelSpec(
        **_sizes(config, positions),
        layers=(
            LayerSpec(
                attention=Attention(
                    **_heads(num_heads, hidden),
                    rope=None,
                    qkv_bias=True,
                    out_bias=True,
                    qkv=(inner + "query", inner + "key", inner + "value"),
                    out=attention + "output.dense",
                ),
                mlp=Mlp(
                    intermediate_size=config["intermediate_size"],
                    activation=activation_of(config, "hidden_act", "gelu"),
                    bias=True,
                    mlp_in=(layer + "intermediate.dense",),
                    mlp_out=layer + "output.dense",
                ),
                attention_sum_norm=attention + "output.LayerNorm",
                mlp_sum_norm=layer + "output.LayerNorm",
            ),
        )
        * config["num_hidden_layers"],
        norm_eps=config["layer_norm_eps"],
        encoder=EncoderParts(
            embedding_norm=f"{base}.embeddings.LayerNorm",
            token_types=f"{base}.embeddings.token_type_embeddings" if types else None,
            num_token_types=types,
            first_position=config["max_position_embeddings"] - positions,
        ),
        embedding=f"{base}.embeddings.word_embeddings",
        position_embedding=f"{base}.embeddings.position_embeddings",
    )


def _distilbert(config: Config, _names: Names) -> ModelSpec:
    """DistilBERT: BERT's layers without types of tokens, under other names."""
    hidden, layer = config["dim"], "distilbert.transformer.layer.{layer}."
    attention = layer + "attention."
    return ModelSpec(
        **_sizes({**config, "hidden_size": hidden}, config["max_position_embeddings"]),
        layers=(
            LayerSpec(
                attention=Attention(
                    **_heads(config["n_heads"], hidden),
                    rope=None,
                    qkv_bias=True,
                    out_bias=True,
                    qkv=(attention + "q_lin", attention + "k_lin", attention + "v_lin"),
                    out=attention + "out_lin",
                ),
                mlp=Mlp(
                    intermediate_size=config["hidden_dim"],
                    activation=activation_of(config, "activation", "gelu"),
                    bias=True,
                    mlp_in=(layer + "ffn.lin1",),
                    mlp_out=layer + "ffn.lin2",
                ),
                attention_sum_norm=layer + "sa_layer_norm",
                mlp_sum_norm=layer + "output_layer_norm",
            ),
        )
        * config["n_layers"],
        norm_eps=1e-12,
        encoder=EncoderParts(embedding_norm="distilbert.embeddings.LayerNorm"),
        embedding="distilbert.embeddings.word_embeddings",
        position_embedding="distilbert.embeddings.position_embeddings",
    )


def _modernbert(config: Config, _names: Names) -> ModelSpec:
    """ModernBERT: RoPE, gated MLPs, and layers whose tokens see those near them."""
    hidden, layer = config["hidden_size"], "model.layers.{layer}."
    bias, mlp_bias, ropes = config["attention_bias"], config["mlp_bias"], config["rope_parameters"]
    kinds = kinds_of(config, lambda _: "full_attention")

    def layer_of(kind: tuple[str, bool]) -> LayerSpec:
        reach, is_first = kind
        heads = _heads(config["num_attention_heads"], hidden)
        is_local = reach == "sliding_attention"
        return LayerSpec(
            attention=Attention(
                **heads,
                rope=rope_of({**config, "rope_parameters": ropes[reach]}, heads["head_dim"]),
                # Half of local_attention on each side, and the token itself.
                window=config["local_attention"] // 2 + 1 if is_local else None,
                qkv_bias=bias,
                out_bias=bias,
                qkv=(layer + "attn.Wqkv",),
                qkv_by_head=False,
                out=layer + "attn.Wo",
            ),
            mlp=Mlp(
                intermediate_size=config["intermediate_size"],
                activation=activation_of(config, "hidden_activation", "gelu"),
                bias=mlp_bias,
                fused_gate=True,
                mlp_in=(layer + "mlp.Wi",),
                mlp_out=layer + "mlp.Wo",
            ),
            # The norm of the embeddings is that of the first layer.
            attention_norm=None if is_first else layer + "attn_norm",
            mlp_norm=layer + "mlp_norm",
        )

    return ModelSpec(
        **(_sizes(config, config["max_position_embeddings"]) | {"final_norm": "model.final_norm"}),
        layers=layers_of(config, [(kind, at == 0) for at, kind in enumerate(kinds)], layer_of),
        norm_eps=config["norm_eps"],
        norm_bias=config["norm_bias"],
        encoder=EncoderParts(embedding_norm="model.embeddings.norm", has_final_norm=True),
        embedding="model.embeddings.tok_embeddings",
    )


def _eurobert(config: Config, _names: Names) -> ModelSpec:
    """EuroBERT: the layers of Llama, whose tokens see later ones too."""
    hidden, layer = config["hidden_size"], "model.layers.{layer}."
    attention, mlp, bias = layer + "self_attn.", layer + "mlp.", config["attention_bias"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    only = LayerSpec(
        attention=Attention(
            num_heads=config["num_attention_heads"],
            num_kv_heads=config["num_key_value_heads"],
            head_dim=head_dim,
            rope=rope_of(config, head_dim, theta=250_000.0),
            qkv_bias=bias,
            out_bias=bias,
            qkv=(attention + "q_proj", attention + "k_proj", attention + "v_proj"),
            out=attention + "o_proj",
        ),
        mlp=Mlp(
            intermediate_size=config["intermediate_size"],
            activation=activation_of(config, "hidden_act", "silu"),
            bias=config["mlp_bias"],
            mlp_in=(mlp + "gate_proj", mlp + "up_proj"),
            mlp_out=mlp + "down_proj",
        ),
        attention_norm=layer + "input_layernorm",
        mlp_norm=layer + "post_attention_layernorm",
    )
    return ModelSpec(
        **(_sizes(config, config["max_position_embeddings"]) | {"norm": "rms", "final_norm": "model.norm"}),
        layers=(only,) * config["num_hidden_layers"],
        norm_eps=config["rms_norm_eps"],
        encoder=EncoderParts(embedding_norm=None, has_final_norm=True),
        embedding="model.embed_tokens",
    )


@dataclass(frozen=True, slots=True)
class _Names:
    """The names of tensors of NomicBERT and GTE."""

    embeddings: str
    embedding_norm: str
    qkv: tuple[str, ...]
    out: str
    mlp_in: tuple[str, ...]
    mlp_out: str
    attention_norm: str
    mlp_norm: str


def _gated_bert(config: Config, names: Names) -> ModelSpec:
    """NomicBERT and GTE: norms behind the sums as in BERT, with RoPE and gated MLPs."""
    hidden, is_gte = config["hidden_size"], config["model_type"] == "gte"
    is_published = any(one.endswith(_PUBLISHED) for one in names)
    published = _published_gte if is_gte else _published_nomic
    own = published() if is_published else _own_names("gte" if is_gte else "nomic_bert")
    heads = _heads(config["num_attention_heads"], hidden)
    if config.get("head_dim", heads["head_dim"]) != heads["head_dim"]:
        raise ConfigError(f"head_dim {config['head_dim']} is not supported: it must be {heads['head_dim']}")
    only = LayerSpec(
        attention=Attention(
            **heads,
            rope=rope_of(config, heads["head_dim"]),
            qkv_bias=is_gte,
            out_bias=is_gte,
            qkv=own.qkv,
            qkv_by_head=False,
            out=own.out,
        ),
        mlp=Mlp(
            intermediate_size=config["intermediate_size"],
            activation=activation_of(config, "hidden_act", "gelu" if is_gte else "silu"),
            out_bias=is_gte,
            fused_gate=len(own.mlp_in) == 1,
            up_first=True,
            mlp_in=own.mlp_in,
            mlp_out=own.mlp_out,
        ),
        attention_sum_norm=own.attention_norm,
        mlp_sum_norm=own.mlp_norm,
    )
    types = config["type_vocab_size"]
    return ModelSpec(
        **_sizes(config, config["max_position_embeddings"]),
        layers=(only,) * config["num_hidden_layers"],
        norm_eps=config["layer_norm_eps"],
        encoder=EncoderParts(
            embedding_norm=own.embedding_norm,
            token_types=own.embeddings + "token_type_embeddings" if types else None,
            num_token_types=types,
        ),
        embedding=own.embeddings + "word_embeddings",
    )


def _own_names(base: str) -> _Names:
    """Return the names that transformers' classes of NomicBERT and GTE have."""
    layer = f"{base}.layers.{{layer}}."
    attention, mlp = layer + "self_attn.", layer + "mlp."
    return _Names(
        embeddings=f"{base}.embeddings.",
        embedding_norm=f"{base}.embeddings.LayerNorm",
        qkv=(attention + "q_proj", attention + "k_proj", attention + "v_proj"),
        out=attention + "o_proj",
        mlp_in=(mlp + "gate_proj", mlp + "up_proj"),
        mlp_out=mlp + "down_proj",
        attention_norm=layer + "post_attention_layernorm",
        mlp_norm=layer + "post_mlp_layernorm",
    )


def _published_nomic() -> _Names:
    base, layer = "nomic_bert.", "nomic_bert.encoder.layers.{layer}."
    return _Names(
        embeddings=base + "embeddings.",
        embedding_norm=base + "emb_ln",
        qkv=(layer + "attn.Wqkv",),
        out=layer + "attn.out_proj",
        mlp_in=(layer + "mlp.fc12", layer + "mlp.fc11"),
        mlp_out=layer + "mlp.fc2",
        attention_norm=layer + "norm1",
        mlp_norm=layer + "norm2",
    )


def _published_gte() -> _Names:
    layer = "gte.encoder.layer.{layer}."
    return _Names(
        embeddings="gte.embeddings.",
        embedding_norm="gte.embeddings.LayerNorm",
        qkv=(layer + "attention.qkv_proj",),
        out=layer + "attention.o_proj",
        mlp_in=(layer + "mlp.up_gate_proj",),
        mlp_out=layer + "mlp.down_proj",
        attention_norm=layer + "attn_ln",
        mlp_norm=layer + "mlp_ln",
    )


def _positions_of(config: Config) -> int:
    """Return how many tokens have a position of their own."""
    return int(num_positions(config) or 0)


def _heads(num_heads: int, hidden: int) -> dict[str, Any]:
    """Return the heads of attention, each with a key of its own."""
    if num_heads < 1 or hidden % num_heads:
        raise ConfigError(f"hidden_size is {hidden} but must be a multiple of the attention heads, {num_heads}")
    return {"num_heads": num_heads, "num_kv_heads": num_heads, "head_dim": hidden // num_heads}


def _sizes(config: Config, max_position: int) -> dict[str, Any]:
    """Return the fields of a spec that most families read alike."""
    return {
        "vocab_size": config["vocab_size"],
        "hidden_size": config["hidden_size"],
        "max_position": max_position,
        "norm": "layer",
        "tied_head": True,
        "head": "",
        "final_norm": "",
    }


_FAMILIES: Mapping[str, Callable[[Config, Names], ModelSpec]] = {
    "bert": lambda config, _: _bert(config, "bert"),
    **dict.fromkeys(("roberta", "xlm-roberta", "camembert"), lambda config, _: _bert(config, "roberta")),
    "data2vec-text": lambda config, _: _bert(config, "data2vec_text"),
    "electra": lambda config, _: _bert(config, "electra"),
    "distilbert": _distilbert,
    "modernbert": _modernbert,
    "nomic_bert": _gated_bert,
    "gte": _gated_bert,
    "eurobert": _eurobert,
}
"""By `model_type`."""
