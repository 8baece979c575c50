"""A Llama small enough to run in milliseconds: random weights, and a tokenizer that any UTF-8 text survives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CORPUS = [
    "the gate opens by pressure and the turbine never starves, never floods; water stands in the reservoir above it",
    "Größe, élan, naïve, żółw: the letters of Europe; 水門は圧力で開く。タービンは止まらない 🌊🌊 ⚙️ 👩‍🔧",
]


def make_tiny_model(folder: Path, *, seed: int = 0, vocab: int = 384, max_position: int = 2048) -> Path:
    """Write a two-layer model to `folder`, the same for the same arguments. `vocab` is the tokenizer's size."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab_size = write_tokenizer(folder, vocab)
    _write_weights(folder, seed, vocab_size, max_position)
    return folder


def write_tokenizer(folder: Path, vocab: int) -> int:
    """Write a byte-level tokenizer to `folder`; its number of tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        min_frequency=1,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>"]
    )
    wrapped.chat_template = _CHAT_TEMPLATE
    wrapped.save_pretrained(folder)
    return int(tokenizer.get_vocab_size())


def _write_weights(folder: Path, seed: int, vocab_size: int, max_position: int) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_position,
        # Wide enough that greedy wanders over the vocabulary instead of repeating one token.
        initializer_range=0.3,
        eos_token_id=2,
        bos_token_id=None,
        tie_word_embeddings=False,
        dtype="float32",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        LlamaForCausalLM(config).save_pretrained(folder)
