"""Make the tokenizer of a GGUF file from its vocabulary, one for each kind that llama.cpp has.

https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, WordPiece

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.checkpoint.gguf_tokenizer import (
    BYTE,
    BYTE_LEVEL,
    CONTROL,
    GEMMA4,
    IGNORE_MERGES,
    SENTENCE_PIECE,
    TOKENIZER_LISTS,
    UNKNOWN,
    USER_DEFINED,
    WORD_PIECE,
    frame_of,
    marks_of,
    name_of,
    special_id,
    special_ids,
    splits_of,
)
from penstock.gpu_node.model.protocol import WrittenTokenizer
from penstock.runtime.reading import reason_of

_METASPACE = "\u2581"
_IN_BYTE_ALPHABET = re.compile("[!-~¡-¬®-\u0143]*")
_MAX_CUTS = 1 << 28
"""Characters that are looked at to find the pairs of pieces that make up others. Those of Gemma's 262,144 take 2^24."""
_MAX_WORD = 100
"""Characters of a word beyond which it is unknown, as in the library of BERT's authors."""
_Merges = list[tuple[str, str]]


def tokenizer_of(metadata: Mapping[str, Any]) -> WrittenTokenizer:
    """Return the tokenizer of a file. metadata: with `TOKENIZER_LISTS`.

    Raises ConfigError that names what is missing, wrong or not supported.
    """
    model = metadata.get("tokenizer.ggml.model")
    if not isinstance(model, str) or model not in _BUILDERS:
        raise ConfigError(f"tokenizer.ggml.model is {model!r}; supported: {', '.join(_BUILDERS)}")
    if not metadata.get(TOKENIZER_LISTS[0]):
        raise ConfigError(f"{TOKENIZER_LISTS[0]} is missing; the file has no tokenizer")
    backend, spellings = _BUILDERS[model](metadata)
    backend.post_processor = frame_of(backend, metadata)
    # Of tokens that are spelled alike, only the last one has an id.
    last = {spelling: token_id for token_id, spelling in enumerate(spellings)}
    return WrittenTokenizer(backend, [text if last[text] == at else "" for at, text in enumerate(spellings)])


# --- byte-level: a text is split into words, and the bytes of each are merged


def _byte_level(metadata: Mapping[str, Any]) -> tuple[Tokenizer, list[str]]:
    name, tokens, marks = name_of(metadata), metadata[TOKENIZER_LISTS[0]], marks_of(metadata)
    if not (merges := metadata.get(TOKENIZER_LISTS[2])):
        raise ConfigError(f"{TOKENIZER_LISTS[2]} is missing, which tokenizer.ggml.model {BYTE_LEVEL} needs")
    spellings = _spellings(tokens, marks)
    backend = _merging(spellings, [tuple(merge.split(" ")) for merge in merges], ignore_merges=name in IGNORE_MERGES)
    backend.decoder = decoders.ByteLevel()
    backend.pre_tokenizer = splits_of(name)
    _add_marks(backend, tokens, marks, special_ids(metadata).values())
    return backend, spellings


def _spellings(tokens: list[str], marks: Mapping[int, bool]) -> list[str]:
    """Return the tokens in the byte alphabet, in which most vocabularies are already. Special tokens stay."""
    if _IN_BYTE_ALPHABET.fullmatch("".join(tokens)) is not None:
        return tokens
    alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return [
        token
        if at in marks or _IN_BYTE_ALPHABET.fullmatch(token) is not None
        else "".join(part for part, _ in alphabet.pre_tokenize_str(token))
        for at, token in enumerate(tokens)
    ]


# --- SentencePiece: the characters of a text are merged by the scores of the pieces that they become


def _sentence_piece(metadata: Mapping[str, Any]) -> tuple[Tokenizer, list[str]]:
    tokens, unknown = metadata[TOKENIZER_LISTS[0]], special_id(metadata, "unknown")
    unk_token = None if unknown is None else tokens[unknown]
    backend = _merging(tokens, _merges_of(metadata), byte_fallback=True, fuse_unk=True, unk_token=unk_token)
    architecture = str(metadata.get("general.architecture"))
    has_prefix = metadata.get("tokenizer.ggml.add_space_prefix", not architecture.startswith("gemma"))
    _write_spaces(backend, has_prefix=has_prefix)
    _add_marks(backend, tokens, marks_of(metadata), special_ids(metadata).values())
    if architecture == "phi3":
        backend.add_special_tokens(_absorbing(metadata))
    return backend, tokens


def _merges_of(metadata: Mapping[str, Any]) -> _Merges:
    """Return the pairs of pieces that make up another one, those with the best scores first."""
    tokens: list[str] = metadata[TOKENIZER_LISTS[0]]
    kinds: Sequence[int] = metadata.get(TOKENIZER_LISTS[1]) or (1,) * len(tokens)
    scores: Sequence[float] = metadata.get(TOKENIZER_LISTS[3]) or (0.0,) * len(tokens)
    # To cut a piece takes as many characters as it has, at each place.
    if (cuts := sum(len(token) ** 2 for token in tokens)) > _MAX_CUTS:
        raise ConfigError(f"{TOKENIZER_LISTS[0]} has too long pieces: {cuts:,} characters in all of their cuts")
    known, found = set(tokens), list[tuple[float, int, str, str]]()
    for piece, kind, score in zip(tokens, kinds, scores, strict=True):
        if kind in (UNKNOWN, CONTROL, BYTE):
            continue
        for at in range(len(piece) - 1, 0, -1):
            if (left := piece[:at]) in known and (right := piece[at:]) in known:
                found.append((score, at, left, right))
    found.sort(key=lambda one: (one[0], one[1]), reverse=True)
    return [(left, right) for _, _, left, right in found]


def _write_spaces(backend: Tokenizer, *, has_prefix: bool) -> None:
    """Write spaces as SentencePiece does. With a prefix, one stands before a text, and after each special token."""
    spaces = normalizers.Replace(" ", _METASPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_METASPACE), spaces]) if has_prefix else spaces
    text: list[Any] = [decoders.Replace(_METASPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*text, decoders.Strip(" ", 1, 0)] if has_prefix else text)


def _absorbing(metadata: Mapping[str, Any]) -> list[AddedToken]:
    """Return the special tokens of Phi-3 that take the spaces behind them."""
    name = str(metadata.get("general.name", "")).lower()
    if "phi-3" not in name and "phi3" not in name:
        return []
    tokens, kinds = (metadata.get(key) or () for key in TOKENIZER_LISTS[:2])
    marks = [token for token, kind in zip(tokens, kinds, strict=False) if kind in (CONTROL, USER_DEFINED)]
    kept = ("<unk>", "<s>", "<|endoftext|>")
    return [AddedToken(mark, normalized=False, rstrip=True, special=True) for mark in marks if mark not in kept]


# --- Gemma 4: the characters of each line are merged


def _gemma4(metadata: Mapping[str, Any]) -> tuple[Tokenizer, list[str]]:
    tokens, unknown = metadata[TOKENIZER_LISTS[0]], special_id(metadata, "unknown")
    if not (merges := metadata.get(TOKENIZER_LISTS[2])):
        raise ConfigError(f"{TOKENIZER_LISTS[2]} is missing, which tokenizer.ggml.model {GEMMA4} needs")
    unk_token = None if unknown is None else tokens[unknown]
    pairs = [tuple(merge.split(" ")) for merge in merges]
    backend = _merging(tokens, pairs, byte_fallback=True, fuse_unk=True, unk_token=unk_token)
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|[\n]+"), behavior="isolated")
    _write_spaces(backend, has_prefix=False)
    _add_marks(backend, tokens, marks_of(metadata), special_ids(metadata).values())
    return backend, tokens


# --- WordPiece: each word becomes the longest pieces that it begins with, one after another


def _word_piece(metadata: Mapping[str, Any]) -> tuple[Tokenizer, list[str]]:
    """Return the tokenizer of BERT. A file marks pieces that begin a word, and BERT's own those that do not."""
    tokens, marks, unknown = metadata[TOKENIZER_LISTS[0]], marks_of(metadata), special_id(metadata, "unknown")
    if unknown is None:
        raise ConfigError(f"tokenizer.ggml.unknown_token_id is missing, which {WORD_PIECE} needs")
    spellings = [
        token if at in marks else token[1:] if token.startswith(_METASPACE) else f"##{token}"
        for at, token in enumerate(tokens)
    ]
    vocab = {spelling: at for at, spelling in enumerate(spellings)}
    backend = Tokenizer(WordPiece(vocab, unk_token=spellings[unknown], max_input_chars_per_word=_MAX_WORD))
    lowers = metadata.get("tokenizer.ggml.normalizer.lowercase", True) is True
    backend.normalizer = normalizers.BertNormalizer(lowercase=lowers, strip_accents=lowers)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    _add_marks(backend, tokens, marks, special_ids(metadata).values())
    return backend, spellings


# --- what all have


def _merging(tokens: list[str], merges: Iterable[Any], **settings: Any) -> Tokenizer:
    vocab = {token: at for at, token in enumerate(tokens)}
    try:
        model = BPE(vocab=vocab, merges=list(merges), continuing_subword_prefix="", end_of_word_suffix="", **settings)
    except Exception as error:
        # The library raises its base class.
        reason = reason_of(error)
        raise ConfigError(f"{TOKENIZER_LISTS[2]} does not fit {TOKENIZER_LISTS[0]}: {reason}") from error
    return Tokenizer(model)


def _add_marks(
    backend: Tokenizer, tokens: Sequence[str], marks: Mapping[int, bool], named: Iterable[int | None]
) -> None:
    """Add the tokens that no text is split in, and those that the file names."""
    # A word that is there twice has only one id.
    own = [at for at in marks if backend.token_to_id(tokens[at]) == at]
    backend.add_special_tokens([AddedToken(tokens[at], normalized=False, special=True) for at in own if marks[at]])
    backend.add_tokens([AddedToken(tokens[at], normalized=False) for at in own if not marks[at]])
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    ids = [at for at in named if isinstance(at, int) and 0 <= at < len(tokens)]
    further = [tokens[at] for at in ids if tokens[at] not in known]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in further])


_BUILDERS: Mapping[str, Callable[[Mapping[str, Any]], tuple[Tokenizer, list[str]]]] = {
    BYTE_LEVEL: _byte_level,
    SENTENCE_PIECE: _sentence_piece,
    GEMMA4: _gemma4,
    WORD_PIECE: _word_piece,
}
"""Kinds of tokenizers; each makes one, and the spelling of its tokens by id."""
