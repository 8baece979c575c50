"""A tokenizer like SentencePiece's in Llama 2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast


def write_sentencepiece_tokenizer(folder: Path) -> None:
    """Write the files of a tokenizer of 260 tokens: a space begins a word, and the decoder drops the first one."""
    vocab = {"<unk>": 0, "\u2581the": 1, "\u2581gate": 2, "s": 3, **{f"<0x{i:02X}>": 4 + i for i in range(256)}}
    backend: Any = Backend(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    new_tokenizer: Any = PreTrainedTokenizerFast
    new_tokenizer(tokenizer_object=backend, unk_token="<unk>").save_pretrained(folder)
