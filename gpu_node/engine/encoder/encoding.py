"""From the texts of a task to tokens: pairs, prompts, and truncation that keeps the marks around a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.contract.errors import PromptTooLongError, RequestError
from penstock.contract.tasks import KINDS, QUERY, Embed, Score, TruncationSide
from penstock.gpu_node.engine.text.encoder import MAX_WHOLE_CHARS, of_tokenizer
from penstock.gpu_node.engine.text.prompts import EmbeddingPrompts
from penstock.gpu_node.engine.texts import EncoderTask, Offsets, PackedTexts
from penstock.gpu_node.model.text_protocol import LoadedEncoder

_OF_TOKENIZER = "tokenize", "detokenize"
"""Kinds of jobs that need no engine."""


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The tokens of one text, or of a pair."""

    ids: Sequence[int]
    types: Sequence[int]
    offsets: Offsets = ()


class TextEncoder:
    """Tokenizes the texts of jobs for one encoder. Thread-safe."""

    def __init__(self, model: LoadedEncoder, backend: Any) -> None:
        """`backend`: the model's tokenizers.Tokenizer."""
        self._model = model
        self._backend = backend
        known = {*_OF_TOKENIZER, *model.head.kinds}
        self.kinds = tuple(kind for kind in KINDS if kind in known)
        """The kinds of jobs that the encoder can run."""
        self.dimensions = model.head.width if model.head.row_kind == "vectors" else 0
        """Numbers of an embedding; 0 if the model makes none."""
        self._prompts = EmbeddingPrompts(model.prompts, model.default_prompt)
        self.similarity = model.similarity
        """How two embeddings are compared."""
        self._has_offsets = model.head.row_kind == "token_labels"
        self._special = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )

    def encode(self, task: EncoderTask, prompt: str | Sequence[int]) -> PackedTexts:
        """Tokenize a job's texts. Raises RequestError that names a text by its number, and PromptTooLongError."""
        self._check(task)
        given = [*task.texts] if isinstance(task, Score) else [prompt, *task.texts]
        limit = task.truncate_prompt_tokens
        most = self._model.max_tokens if limit is None else min(limit, self._model.max_tokens)
        texts = {at: self._text_of(task, one, at) for at, one in enumerate(given) if isinstance(one, str)}
        query = None
        if isinstance(task, Score):
            query = self._query_of(prompt)
            if len(texts) < len(given):
                raise RequestError(f"{QUERY}: must be a text, not token ids", param=QUERY)
        encoded = dict(zip(texts, self._encoded(task, query, list(texts.values())), strict=True))
        found = list[_Tokens]()
        for at, one in enumerate(given):
            if isinstance(one, str):
                tokens = encoded[at]
                if len(tokens.ids) > most:
                    self._require_cut(task, at, len(tokens.ids))
                    tokens = self._cut(task, query, texts[at], most)
            else:
                tokens = self._of_ids(task, one, at, most)
            found.append(tokens)
        starts = np.cumsum([0, *(len(one.ids) for one in found)])
        return PackedTexts(
            task=task,
            token_ids=np.concatenate([np.array(one.ids, np.int32) for one in found]),
            starts=starts.astype(np.int32),
            types=np.concatenate([np.array(one.types, np.int32) for one in found]),
            texts=tuple(texts.get(at, "") for at in range(len(given))) if self._has_offsets else (),
            offsets=tuple(one.offsets for one in found) if self._has_offsets else (),
        )

    def _check(self, task: EncoderTask) -> None:
        """Refuse what the model does not have: a kind of job, dimensions, a prompt."""
        if task.kind not in self.kinds:
            raise RequestError(f"this model does not {task.kind}; it can {', '.join(self.kinds)}", param="model")
        if not isinstance(task, Embed):
            return
        if (task.dimensions or 0) > self.dimensions:
            message = f"dimensions is {task.dimensions}, but this model's embeddings have {self.dimensions}"
            raise RequestError(message, param="dimensions")
        self._prompts.before(task)

    def _text_of(self, task: EncoderTask, text: str, at: int) -> str:
        """Return a text as the model expects it: after its prompt, in lower case. Raises RequestError."""
        if not text:
            raise RequestError(f"{_name(task, at)}: the text is empty", param=_name(task, at))
        self._check_size(text, _name(task, at))
        if isinstance(task, Embed):
            text = self._prompts.before(task) + text
        return text.lower() if self._model.lowercases else text

    def _query_of(self, prompt: str | Sequence[int]) -> str:
        if not isinstance(prompt, str):
            raise RequestError(f"{QUERY}: must be a text, not token ids", param=QUERY)
        if not prompt:
            raise RequestError(f"{QUERY}: the text is empty", param=QUERY)
        self._check_size(prompt, QUERY)
        return prompt.lower() if self._model.lowercases else prompt

    def _check_size(self, text: str, name: str) -> None:
        """Refuse a text whose tokenization would take too much memory: the library takes 600 bytes a character."""
        if len(text) > MAX_WHOLE_CHARS:
            message = f"{name}: the text has {len(text)} characters; the limit is {MAX_WHOLE_CHARS}"
            raise RequestError(message, param=name)

    def _encoded(self, task: EncoderTask, query: str | None, texts: list[str]) -> list[_Tokens]:
        """Return the texts' tokens, each with its marks; with a query, those of pairs, each text within its limit."""
        if isinstance(task, Score) and task.own_limits:
            return [self._cut(task, query, text) for text in texts]
        if not texts:
            return []
        inputs: list[Any] = texts if query is None else [(query, text) for text in texts]
        encode = self._backend.encode_batch if self._has_offsets else self._backend.encode_batch_fast
        with of_tokenizer("encode this text"):
            return [self._tokens(one) for one in encode(inputs, add_special_tokens=True)]

    def _cut(self, task: EncoderTask, query: str | None, text: str, most: int | None = None) -> _Tokens:
        """Return a text's tokens with its marks. Each text of a pair is first cut to its own limit.

        most: the tokens in all, for which the longer text of a pair is cut first; None: no such limit.
        """
        encode = self._backend.encode_batch if self._has_offsets else self._backend.encode_batch_fast
        with of_tokenizer("encode this text"):
            parts = encode([text] if query is None else [query, text], add_special_tokens=False)
            lengths = [len(one.ids) for one in parts]
            if isinstance(task, Score):
                limits = task.max_tokens_per_query, task.max_tokens_per_doc
                lengths = [min(length, limit or length) for length, limit in zip(lengths, limits, strict=True)]
            if most is not None:
                room = most - self._backend.num_special_tokens_to_add(query is not None)
                if room < len(parts):
                    message = f"truncate_prompt_tokens is {most}, which leaves no token beside the marks around a text"
                    raise RequestError(message, param="truncate_prompt_tokens")
                lengths = _kept(lengths, room)
            for part, length in zip(parts, lengths, strict=True):
                part.truncate(length, direction=task.truncation_side or "right")
            return self._tokens(self._backend.post_process(*parts, *([None] if query is None else []), True))

    def _tokens(self, encoding: Any) -> _Tokens:
        offsets: Offsets = ()
        if self._has_offsets:
            marks = encoding.special_tokens_mask
            offsets = tuple((0, 0) if mark else pair for pair, mark in zip(encoding.offsets, marks, strict=True))
        return _Tokens(encoding.ids, encoding.type_ids, offsets)

    def _of_ids(self, task: EncoderTask, ids: Sequence[int], at: int, most: int) -> _Tokens:
        """Return token ids as the caller gave them, its marks included. A mark at their end is kept."""
        if self._has_offsets:
            raise RequestError(f"{_name(task, at)}: must be a text, not token ids", param=_name(task, at))
        size = self._model.vocab_size
        if not ids:
            raise RequestError(f"{_name(task, at)}: the text is empty", param=_name(task, at))
        if not 0 <= min(ids) <= max(ids) < size:
            raise RequestError(
                f"{_name(task, at)}: a token id is outside the vocabulary of {size}", param=_name(task, at)
            )
        if len(ids) > most:
            self._require_cut(task, at, len(ids))
            ids = self._cut_ids(ids, most, task.truncation_side or "right")
        return _Tokens(ids, [0] * len(ids))

    def _cut_ids(self, ids: Sequence[int], most: int, side: TruncationSide) -> Sequence[int]:
        """Return as many token ids, and of a mark at the end that is cut off the mark."""
        if side == "right":
            return [*ids[: most - 1], ids[-1]] if ids[-1] in self._special else ids[:most]
        return [ids[0], *ids[len(ids) - most + 1 :]] if ids[0] in self._special else ids[-most:]

    def _require_cut(self, task: EncoderTask, at: int, num_tokens: int) -> None:
        """Raise PromptTooLongError for a text beyond the limit, unless the request truncates."""
        if task.truncate_prompt_tokens is None:
            raise PromptTooLongError(
                f"{_name(task, at)}: {num_tokens} tokens, but this model takes {self._model.max_tokens} at most. "
                "truncate_prompt_tokens -1 keeps the first ones",
                param=_name(task, at),
            )


def _name(task: EncoderTask, at: int) -> str:
    """Return the field of a text, by its number among those of its caller."""
    return f"prompt[{task.index_of(at)}]"


def _kept(lengths: list[int], room: int) -> list[int]:
    """Return how many tokens stay of each text, `room` in all: the longer text of a pair is cut first."""
    if len(lengths) == 1:
        return [min(lengths[0], room)]
    shorter, longer = sorted(lengths)
    of_shorter = min(shorter, room // 2)
    of_longer = min(longer, room - of_shorter)
    return [of_shorter, of_longer] if lengths[0] <= lengths[1] else [of_longer, of_shorter]
