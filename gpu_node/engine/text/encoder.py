"""Tokenization of long texts: in parts, which bounds the memory, and with a cache of pieces that many texts share."""

from __future__ import annotations

import base64
import json
import math
import re
import threading
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from typing import Any, TypeAlias

from cachetools import LRUCache

from penstock.contract.errors import ConfigError, RequestError
from penstock.runtime.reading import is_of_content, reason_of

MIN_CACHED_CHARS = 512
"""A shorter piece is encoded faster than it is looked up."""
MAX_CACHED_TOKENS = 1 << 20
"""Limit of the cache, over all pieces."""
MAX_CACHED_PROMPT_TOKENS = 1 << 18
"""The same for the plain prompts. They have a cache of their own: a batch of prompts, no two of which are equal, would
drop the pieces of chats."""

PART_CHARS = 8 << 10
"""Characters that are encoded at once, where a text can be cut. The library takes 150 to 600 bytes for each."""
_AROUND_CUT = 64
"""Characters on both sides of a cut that must be split there."""
MAX_WORD_CHARS = 256 << 10
"""Characters without a place for a cut, such as one word or one run of spaces. The library takes 90 to 600 bytes for
each."""
MAX_WHOLE_CHARS = 1 << 20
"""Characters of a normalized text where a tokenizer permits no cuts."""
MAX_SMALL_WHOLE_CHARS = 32 << 10
"""Characters up to which such a text needs no turn. Longer ones are encoded one at a time: the library takes up to 342
bytes for each character."""
_MAX_TRIES = 4
"""Places that are tried before a part is split by the tokenizer itself."""
_MAX_TRIES_OF_WORD = 1024
_CHANGE = re.compile(r"(?<=\w)(?=\W)|(?<=[^\w\s])(?=[\w\s])")
"""The end of a run of letters and digits, or of signs."""
_CUT = re.compile(r"(?<=\w)(?=[ \n]\w)")
"""A place for a cut: between a word, and a space or the end of its line."""
_JOINING = re.compile("[\u1160-\u11ff]")
"""Letters of Hangul that normalization may join to the letter before them."""
_HARMLESS_NORMALIZERS = frozenset({"NFC", "Prepend", "Replace", "Strip", "Lowercase"})
"""They make a text longer by a few times at most, where `Growth` does not say more."""
_CHARSMAP = "Precompiled"
_MEASURED_NORMALIZERS = frozenset({_CHARSMAP, "ByteLevel", "BertNormalizer", "Nmt"})
"""What they make of a text is known only by normalizing it."""
_LOOKS_BACK = re.compile(r"\(\?<[=!]|\\[bBAGKzZ]|(?<!\[)(?<!\\)\^")
"""Parts of a pattern that read text before the match."""

Ids: TypeAlias = tuple[int, ...]
Owner: TypeAlias = tuple[str, str | None]
"""A tenant and the `cache_salt` of its request. Owners share no cached piece, so times tell nothing of other owners."""
NO_OWNER: Owner = ("", None)
"""The owner of texts that belong to no request."""


def token_ids_of(backend: Any, text: str, *, framed: bool) -> list[int]:
    """Encode a text; see `batch_token_ids_of`."""
    (ids,) = batch_token_ids_of(backend, [text], framed=framed)
    return ids


def batch_token_ids_of(backend: Any, texts: Sequence[str], *, framed: bool) -> list[list[int]]:
    """Encode texts; `framed`: with the special tokens that the model expects. `backend`: a tokenizers.Tokenizer.

    Raises RequestError for lone surrogates, and for a text at which the tokenizer fails.
    """
    with of_tokenizer("encode this text"):
        try:
            # The library releases the GIL only for batches; the fast variant also skips the offsets.
            encodings = backend.encode_batch_fast(list(texts), add_special_tokens=framed)
        except TypeError:
            raise RequestError("text must be valid Unicode, without lone surrogates", param="prompt") from None
    return [encoding.ids for encoding in encodings]


class TokenizerFailedError(RequestError):
    """The model's files describe a tokenizer that fails at this text."""


def spans_of(backend: Any, text: str, *, framed: bool) -> list[tuple[int, int] | None]:
    """Return the characters of each token of a text: the first one, and the one after the last.

    None stands for a token that is not of the text. Raises RequestError for a text that is too long for it.
    """
    if len(text) > MAX_WHOLE_CHARS:
        message = f"prompt: the text has {len(text)} characters; the limit for places of tokens is {MAX_WHOLE_CHARS}"
        raise RequestError(message, param="prompt")
    with of_tokenizer("encode this text"):
        (found,) = backend.encode_batch([text], add_special_tokens=framed)
    marks = zip(found.offsets, found.special_tokens_mask, strict=True)
    return [None if is_mark else place for place, is_mark in marks]


@contextmanager
def of_tokenizer(work: str) -> Iterator[None]:
    """Translate what the library raises in the block. A pattern that backtracks too often is a panic there."""
    try:
        yield
    except BaseException as error:
        if not is_of_content(error):
            raise
        message = f"the model's tokenizer cannot {work}: {reason_of(error)}"
        raise TokenizerFailedError(message, param="prompt") from error


class LongTextEncoder:
    """Encodes long texts in parts, with the ids that the whole text has. Thread-safe.

    A byte-level tokenizer first splits a text by a pattern that reads only forward. If the pattern splits before a
    space, the texts before and after it have the same tokens apart. Where there is no such place, the pattern splits a
    part of the text that begins at a known place. Other tokenizers encode the whole text at once.

    So time grows with the length of a text, and memory with its longest word, which is limited. Where whole texts are
    encoded, only one long text at a time is, whatever the number of threads.
    """

    def __init__(self, backend: Any, separator: re.Pattern[str] | None) -> None:
        """`separator`: what `separator_of` returned for the backend."""
        self._backend = backend
        self._separator = separator
        self._cuts = separator is not None and _reads_forward(backend)
        self._turn = threading.Lock()
        """Held while a long text is encoded at once."""

    def encode(self, text: str, *, framed: bool) -> list[int]:
        """Encode a text; `framed`: with the special tokens that the model expects. Raises RequestError."""
        if not self._cuts or self._separator is None:
            num_chars = self._checked_size(text)
            with self._turn if num_chars > MAX_SMALL_WHOLE_CHARS else nullcontext():
                return token_ids_of(self._backend, text, framed=framed)
        if len(text) <= 2 * PART_CHARS:
            return token_ids_of(self._backend, text, framed=framed)
        before, after = self._frame() if framed else ((), ())
        ids = list(before)
        for piece in self._separator.split(text):
            for part in self._parts(piece):
                ids += self._known(token_ids_of(self._backend, part, framed=False))
        return [*ids, *after] if after else ids

    @cached_property
    def _ids(self) -> list[int]:
        """The token ids. The ids of a long text are these objects, because a million of new ones take 28 MB."""
        # The library would hold the GIL for 90 ms to list a vocabulary of 150,000 tokens. Ids seldom have gaps.
        return list(range(self._backend.get_vocab_size()))

    def _known(self, ids: list[int]) -> Iterable[int]:
        """Return the same ids as the objects of `_ids`, where these have all of them."""
        known = self._ids
        return map(known.__getitem__, ids) if max(ids, default=0) < len(known) else ids

    def _frame(self) -> tuple[list[int], list[int]]:
        """Return the special tokens before and after a text."""
        plain, framed = (token_ids_of(self._backend, "a", framed=one) for one in (False, True))
        at = next(at for at in range(len(framed)) if framed[at : at + len(plain)] == plain)
        return framed[:at], framed[at + len(plain) :]

    def _parts(self, text: str) -> Iterator[str]:
        start = 0
        while len(text) - start > 2 * PART_CHARS:
            least = start + PART_CHARS
            found = (one.start() for one in islice(_CUT.finditer(text, least, least + PART_CHARS), _MAX_TRIES))
            cut = next((at for at in found if self._is_split_at(text, at)), None)
            if cut is None:
                cut = self._split_after(text, start)
            yield text[start:cut]
            start = cut
        yield text[start:]

    def _split_after(self, text: str, start: int) -> int:
        """Return a place for a cut after `start`, at which the tokenizer splits the text, or the end of the text.

        Raises RequestError if the next one is too far. The last splits of a part may depend on the text behind it.
        """
        part = text[start : start + 2 * PART_CHARS]
        for _, (at, _) in reversed(self._spans(part)):
            if 0 < at <= len(part) - _AROUND_CUT and _may_cut(part, at):
                return start + at
        # A long word. The library would hold the GIL too long for all of it, so its end is looked for.
        found = (one.start() for one in _CHANGE.finditer(text, start + PART_CHARS, start + MAX_WORD_CHARS))
        for at in islice((at for at in found if _may_cut(text, at)), _MAX_TRIES_OF_WORD):
            if self._is_split_at(text, at):
                return at
        if len(text) - start <= MAX_WORD_CHARS:
            return len(text)
        message = f"the text has more than {MAX_WORD_CHARS} characters in which no word ends, too many for a tokenizer"
        raise RequestError(f"{message}; separate words by spaces or lines", param="prompt")

    def _checked_size(self, text: str) -> int:
        """Return the number of characters of a text after normalization, by Python's as a bound of the library's.

        Raises RequestError if it is too large for a text that is encoded at once.
        """
        num_chars = len(text)
        if num_chars <= MAX_WHOLE_CHARS and self._kinds & _MEASURED_NORMALIZERS:
            # Lone surrogates are refused when the text is encoded.
            valid = text.encode(errors="replace").decode()
            with of_tokenizer("normalize this text"):
                num_chars = _sum_of_parts(valid, self._backend.normalizer.normalize_str)
        elif num_chars <= MAX_WHOLE_CHARS:
            if not text.isascii() and not self._kinds <= _HARMLESS_NORMALIZERS:
                num_chars = _sum_of_parts(text, partial(unicodedata.normalize, "NFKD"))
            num_chars = self._growth.of(num_chars, 1 + self._num_cuts(text))
        if num_chars > MAX_WHOLE_CHARS:
            message = f"the text has {num_chars} characters after normalization; this model's tokenizer takes a text"
            raise RequestError(f"{message} at once, of up to {MAX_WHOLE_CHARS} characters", param="prompt")
        return num_chars

    def _num_cuts(self, text: str) -> int:
        """Return how often an added token cuts a text before it is normalized, if that matters."""
        if not self._growth.added or self._growth.of(len(text), len(text)) <= MAX_SMALL_WHOLE_CHARS:
            return 0
        return 0 if self._unnormalized is None else sum(1 for _ in self._unnormalized.finditer(text))

    @cached_property
    def _unnormalized(self) -> re.Pattern[str] | None:
        added = self._backend.get_added_tokens_decoder().values()
        return _pattern_of(token.content for token in added if not token.normalized)

    @cached_property
    def _growth(self) -> Growth:
        return Growth.of_steps(_steps_of(self._backend.normalizer, "normalizers"))

    @cached_property
    def _kinds(self) -> set[str]:
        return {step["type"] for step in _steps_of(self._backend.normalizer, "normalizers")}

    def _is_split_at(self, text: str, at: int) -> bool:
        start = at - _AROUND_CUT
        around = text[start : at + _AROUND_CUT]
        return any(span[0] == _AROUND_CUT for _, span in self._spans(around))

    def _spans(self, text: str) -> list[tuple[str, tuple[int, int]]]:
        with of_tokenizer("split this text"):
            spans: list[tuple[str, tuple[int, int]]] = self._backend.pre_tokenizer.pre_tokenize_str(text)
        return spans


class TokenCache:
    """The token ids of texts of at least `MIN_CACHED_CHARS`, least recently used first out. Thread-safe.

    With the demo model a text of 1,000 characters takes 350 µs to encode, and 1 µs to look up.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        # Keyed by tenant: (Owner, piece of a chat or plain prompt); an Owner is (tenant, cache_salt).
        self._known: LRUCache[tuple[Owner, str], Ids] = LRUCache(max_tokens, getsizeof=len)
        self._lock = threading.Lock()

    def ids_of(self, owner: Owner, text: str, encode: Callable[[str], Sequence[int]]) -> Ids:
        """Return the token ids of an owner's text, which `encode` returns where they are not known."""
        with self._lock:
            ids = self._known.get((owner, text))
        if ids is None:
            ids = tuple(encode(text))
            with self._lock:
                if len(ids) <= self._max_tokens:
                    self._known[owner, text] = ids
        return ids


class ChatEncoder:
    """Encodes rendered chats piece by piece, cut at added tokens, which no other token crosses.

    Long pieces (system prompts, documents, earlier messages) are kept in an LRU cache. Thread-safe.
    """

    def __init__(self, backend: Any, separator: re.Pattern[str] | None, long_texts: LongTextEncoder) -> None:
        """`backend`: a tokenizers.Tokenizer. If its pieces depend on their neighbors, whole texts are encoded.

        `separator`: what `separator_of` returned for the backend.
        """
        self._backend = backend
        self._separator = separator
        self._long_texts = long_texts
        self._cache = TokenCache(MAX_CACHED_TOKENS)

    def encode(self, text: str, owner: Owner = NO_OWNER) -> list[int]:
        """Encode a text without adding special tokens."""
        if self._separator is None or len(text) < MIN_CACHED_CHARS:
            return self._long_texts.encode(text, framed=False)
        return [token_id for piece in _pieces(self._separator, text) for token_id in self._encode_piece(owner, piece)]

    def _encode_piece(self, owner: Owner, piece: str) -> Sequence[int]:
        if len(piece) < MIN_CACHED_CHARS:
            return token_ids_of(self._backend, piece, framed=False)
        return self._cache.ids_of(owner, piece, partial(self._long_texts.encode, framed=False))


def _pieces(separator: re.Pattern[str], text: str) -> Iterator[str]:
    """Split a text at added tokens, into long pieces and the short text between them."""
    short: list[str] = []
    for part in separator.split(text):
        if len(part) < MIN_CACHED_CHARS:
            short.append(part)
            continue
        if short:
            yield "".join(short)
            short.clear()
        yield part
    if short:
        yield "".join(short)


def _may_cut(text: str, at: int) -> bool:
    """Return whether a split at this place stays one, whatever follows the text.

    Spaces are left to what follows them, and a run of letters or digits may be grouped from its end. Normalization may
    join a mark to the letter before it.
    """
    before, after = text[at - 1], text[at]
    is_inside = before.isspace() or (before.isalnum() and after.isalnum())
    return not is_inside and not unicodedata.category(after).startswith("M") and not _JOINING.match(after)


@dataclass(frozen=True, slots=True)
class Growth:
    """How many characters replacing and prepending make of a text at most: `factor` times as many, plus `added`."""

    factor: float = 1.0
    added: float = 0.0
    """... for each piece of the text between two added tokens."""

    @classmethod
    def of_steps(cls, steps: Iterable[Mapping[str, Any]]) -> Growth:
        """Return the growth by the steps of a normalizer or decoder, in the format of tokenizer.json."""
        factor, added = 1.0, 0.0
        for step in steps:
            if step["type"] == "Prepend":
                added += _longest(step["prepend"])
            elif step["type"] == "Replace":
                length, pattern = _longest(step["content"]), step["pattern"].get("String")
                # A pattern may match the empty text between any two characters, and beside them.
                times, more = (1 + length, length) if pattern is None else (max(1, length / max(1, len(pattern))), 0)
                factor, added = factor * times, added * times + more
        return cls(factor, added)

    def of(self, num_chars: int, num_pieces: int) -> int:
        """Return the most characters that a text may have afterwards."""
        return math.ceil(num_chars * self.factor + num_pieces * self.added)


def _sum_of_parts(text: str, normalize: Callable[[str], str]) -> int:
    """Return the characters of a text's parts after normalization, or some number above the limit."""
    total = 0
    for at in range(0, len(text), PART_CHARS):
        total += len(normalize(text[at : at + PART_CHARS]))
        if total > MAX_WHOLE_CHARS:
            break
    return total


def _longest(text: str) -> int:
    """Return the characters of a replacement, after later steps have decomposed it."""
    return len(unicodedata.normalize("NFKD", text))


def _steps_of(part: Any, inner: str) -> list[dict[str, Any]]:
    """Return the steps of a normalizer or decoder in their order; `inner` is the field that has those of a sequence."""
    if part is None:
        return []

    def flat(spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for one in spec[inner] if spec["type"] == "Sequence" else ():
            yield from flat(one)
        if spec["type"] != "Sequence":
            yield spec

    return list(flat(json.loads(part.__getstate__())))


def check_growth(backend: Any) -> None:
    """Refuse a tokenizer that makes a text far longer, before or after it is encoded. Raises ConfigError."""
    from penstock.gpu_node.model.architecture.limits import MAX_FRAME_TOKENS, MAX_GROWTH

    if (num_framing := backend.num_special_tokens_to_add(False)) > MAX_FRAME_TOKENS:
        found = f"the post_processor of its tokenizer.json puts {num_framing:,} tokens around a text"
        raise ConfigError(f"{found}; at most {MAX_FRAME_TOKENS:,} are supported")
    for name, inner in (("normalizer", "normalizers"), ("decoder", "decoders")):
        steps = _steps_of(getattr(backend, name), inner)
        growth = Growth.of_steps(steps)
        most = max(growth.factor, growth.added, *map(_longest_of_charsmap, steps))
        if most > MAX_GROWTH:
            found = f"the {name} of its tokenizer.json may make {most:,.0f} characters of one"
            raise ConfigError(f"{found} (Replace, Prepend, Precompiled); at most {MAX_GROWTH} are supported")


def _longest_of_charsmap(step: Mapping[str, Any]) -> int:
    """Return the characters of the longest text by which SentencePiece's map replaces a character; 0 if there is none.

    The map is a trie with its size before it, and texts that end in a zero.
    """
    if step["type"] != _CHARSMAP:
        return 0
    content = base64.b64decode(step["precompiled_charsmap"])
    texts = content[4 + int.from_bytes(content[:4], "little") :].split(b"\0")
    return max(len(text.decode(errors="replace")) for text in texts)


def _reads_forward(backend: Any) -> bool:
    """Return whether each split of a byte-level tokenizer depends on no text before it, and no text is normalized."""
    normalizer = None if backend.normalizer is None else json.loads(backend.normalizer.__getstate__())
    if normalizer is not None and normalizer["type"] != "NFC":
        return False
    if _LOOKS_BACK.search(backend.pre_tokenizer.__getstate__().decode()):
        return False
    return {step["type"] for step in _steps(backend)} <= {"ByteLevel", "Split", "Digits"}


def _steps(backend: Any) -> list[dict[str, Any]]:
    """Return the steps that split a text before it is encoded."""
    spec: dict[str, Any] = (
        json.loads(backend.pre_tokenizer.__getstate__()) if backend.pre_tokenizer else {"type": "none"}
    )
    steps: list[dict[str, Any]] = spec["pretokenizers"] if spec["type"] == "Sequence" else [spec]
    return steps


def separator_of(backend: Any) -> re.Pattern[str] | None:
    """Return a pattern of the added tokens; None if a piece's tokens may depend on its neighbors.

    They do not if the tokenizer is byte-level and no added token absorbs neighboring spaces. A normalizer is applied
    after the text is cut at the added tokens that are not normalized themselves: only these separate pieces then.
    """
    added = list(backend.get_added_tokens_decoder().values())
    if any(token.lstrip or token.rstrip or token.single_word for token in added):
        return None
    if backend.normalizer is not None:
        added = [token for token in added if not token.normalized]
    if backend.encode_special_tokens:
        return None
    steps = _steps(backend)
    if any(step.get("add_prefix_space") for step in steps) or all(step["type"] != "ByteLevel" for step in steps):
        return None
    return _pattern_of(token.content for token in added)


def _pattern_of(tokens: Iterable[str]) -> re.Pattern[str] | None:
    # Longest first, since one added token may be a prefix of another.
    contents = sorted((re.escape(token) for token in tokens), key=len, reverse=True)
    return re.compile(f"({'|'.join(contents)})") if contents else None
