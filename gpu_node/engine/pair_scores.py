"""Scores of pairs by a model that generates text: its logits of two tokens, such as *yes* and *no*, after a prompt."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.contract.errors import ConfigError, PenstockError, PromptTooLongError, RequestError
from penstock.contract.tasks import QUERY, Score, TruncationSide
from penstock.gpu_node.engine.sequence import PooledPrompt
from penstock.gpu_node.engine.text.chat import ChatTemplate
from penstock.gpu_node.engine.text.encoder import spans_of
from penstock.gpu_node.engine.text.tokenizer import Tokenizer
from penstock.gpu_node.model.protocol import LoadedModel

log = logging.getLogger(__package__)

_MODULES = "modules.json"
_SETTINGS = "config_sentence_transformers.json"
_LOGIT_SCORES = "LogitScore", "CausalScoreHead"
"""Ends of the names of sentence-transformers' modules for such scores."""
_MAX_FILE_BYTES = 1 << 20
_QUERY_MARK, _DOCUMENT_MARK = "\ue0f1q\ue0f2", "\ue0f1d\ue0f2"
"""Texts of private characters, which stand for the query and the document while the template is read."""


@dataclass(frozen=True, slots=True)
class _Known:
    """A family of models whose files do not say how they score."""

    named: re.Pattern[str]
    """What the model's name has."""
    tokens: tuple[str, str]
    """The tokens for a document that fits, and for one that does not."""
    parts: tuple[str, str, str]
    """The prompt before the query, between query and document, and after it, as the model's card has it."""


_OF_QWEN = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided"
    '. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n<Query>: "
)
_OF_MXBAI = (
    "\nYou are a search relevance expert who evaluates how well documents match search queries. For each query-"
    "document pair, carefully analyze the semantic relationship between them, then provide your binary relevance "
    "judgment (0 for not relevant, 1 for relevant).\nRelevance:<|im_end|>\n<|im_start|>assistant\n"
)
_KNOWN = (
    _Known(
        re.compile(r"qwen3-reranker", re.IGNORECASE),
        ("yes", "no"),
        (_OF_QWEN, "\n<Document>: ", "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"),
    ),
    _Known(
        re.compile(r"mxbai-rerank-\w+-v2", re.IGNORECASE),
        ("1", "0"),
        (
            "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
            "<|im_start|>user\nquery: ",
            "\ndocument: ",
            _OF_MXBAI,
        ),
    ),
)


@dataclass(frozen=True, slots=True, eq=False)
class PairScores:
    """How a model scores a document for a query: the prompt around both, and what becomes of its last hidden state."""

    parts: tuple[str, str, str]
    """The prompt before the query, between query and document, and after it."""
    weights: NDArray[np.float32]
    """[hidden_size]: the head's row of the first token, without that of the second one."""
    is_raw: bool
    """Whether a score is the difference of the logits, not its sigmoid, for requests that do not say it."""

    def encode(self, tokenizer: Tokenizer, task: Score, query: str, max_tokens: int) -> list[int]:
        """Return the tokens of the prompt for the only text of a task. `max_tokens`: what the model takes.

        The query comes first, so the documents of one query share its cached prefix. Raises RequestError.
        """
        (document,), named = task.texts, f"prompt[{task.index_of(0)}]"
        if not isinstance(document, str):
            raise RequestError(f"{named}: must be a text, not token ids", param=named)
        for name, text in ((QUERY, query), (named, document)):
            if not text:
                raise RequestError(f"{name}: the text is empty", param=name)
        query = _shortened(tokenizer, query, task.max_tokens_per_query, task.truncation_side)
        document = _shortened(tokenizer, document, task.max_tokens_per_doc, task.truncation_side)
        before, between, after = self.parts
        limit = task.truncate_prompt_tokens
        most = max_tokens if limit is None else min(limit, max_tokens)
        whole = tokenizer.encode(before + query + between + document + after, framed=False)
        if len(whole) <= most:
            return whole
        if limit is None:
            raise PromptTooLongError(
                f"{named}: {len(whole)} tokens with the query and the model's template, but this model takes "
                f"{max_tokens} at most. truncate_prompt_tokens -1 keeps the first ones",
                param=named,
            )
        first, last = (tokenizer.encode(text, framed=False) for text in (before + query + between, after))
        if (room := most - len(first) - len(last)) < 1:
            message = f"{QUERY}: {len(first) + len(last)} tokens with the model's template leave no room for a document"
            raise RequestError(message, param=QUERY)
        own = tokenizer.encode(document, framed=False)
        return [*first, *(own[-room:] if task.truncation_side == "left" else own[:room]), *last]


def _shortened(tokenizer: Tokenizer, text: str, limit: int | None, side: TruncationSide | None) -> str:
    """Return the part of a text that has at most `limit` tokens: its end if the left side is cut off."""
    if limit is None or len(spans := spans_of(tokenizer.backend, text, framed=False)) <= limit:
        return text
    if side == "left":
        first = spans[-limit]
        return text if first is None else text[first[0] :]
    last = spans[limit - 1]
    return text if last is None else text[: last[1]]


class ScoredPrompt(PooledPrompt):
    """The score of a pair: one number from the last hidden state of a prompt."""

    def __init__(self, num_tokens: int, wanted: Score, scores: PairScores) -> None:
        super().__init__(num_tokens, "last")
        self._is_raw = scores.is_raw if wanted.raw is None else wanted.raw
        self._weights = scores.weights

    def vector(self) -> NDArray[np.float32] | None:
        """Return the score, [1]; None if the model computed NaN or infinity."""
        logit = float(self.sums() @ self._weights)
        if not np.isfinite(logit):
            return None
        return np.array([logit if self._is_raw else 1 / (1 + np.exp(-np.clip(logit, -80, 80)))], "<f4")


def pair_scores_of(name: str, model: LoadedModel, tokenizer: Tokenizer) -> PairScores | None:
    """Return how a model scores pairs; None if it does not.

    Raises ConfigError for files of sentence-transformers that say it and do not fit the model.
    """
    # Imported late, as all that reads a model's files.
    from penstock.gpu_node.model.encoders.files import score_activation_of

    told = _tokens_in(model.folder)
    if told is not None:
        parts = _parts_of(model.folder, tokenizer.template)
    elif (known := next((one for one in _KNOWN if one.named.search(name)), None)) is not None:
        told, parts = tuple(tokenizer.id_of(token) for token in known.tokens), known.parts
        if None in told:
            return None
    else:
        return None
    ids = [one for one in told if one is not None]
    if not all(0 <= one < model.vocab_size for one in ids):
        raise ConfigError(f"{model.folder}: a token of {_LOGIT_SCORES[0]} is outside the vocabulary")
    rows = None if model.head_rows is None else model.head_rows(ids)
    if rows is None:
        log.warning("the model scores no pairs: the rows of its head cannot be read", extra={"model": name})
        return None
    weights = rows[0] if len(rows) == 1 else rows[0] - rows[1]
    path = model.folder / "config.json"
    activation = score_activation_of(_read(path) if path.is_file() else {}, path)
    return PairScores(parts, weights.astype(np.float32), is_raw=activation == "identity")


def _tokens_in(folder: Path) -> tuple[int | None, ...] | None:
    """Return the ids of the two tokens that a module of sentence-transformers names; None if no module does."""
    path = folder / _MODULES
    listed = _read(path) if path.is_file() else []
    if not isinstance(listed, list):
        raise ConfigError(f"{path}: must be a list of modules")
    for one in listed:
        kind = str(one.get("type")).rpartition(".")[2] if isinstance(one, dict) else ""
        if kind not in _LOGIT_SCORES:
            continue
        config = folder / str(one.get("path")) / "config.json"
        if not config.resolve().is_relative_to(folder.resolve()) or not config.is_file():
            raise ConfigError(f"{path}: the folder of {kind} is not in the model's folder")
        fields = _read(config)
        ids = tuple(
            fields.get(name) if isinstance(fields, dict) else None for name in ("true_token_id", "false_token_id")
        )
        if type(ids[0]) is not int or not isinstance(ids[1], int | None):
            raise ConfigError(f"{config}: true_token_id and false_token_id must be ids of tokens")
        return ids
    return None


def _parts_of(folder: Path, template: ChatTemplate | None) -> tuple[str, str, str]:
    """Return the three parts of the prompt that the chat template writes around a query and a document."""
    messages = [{"role": "query", "content": _QUERY_MARK}, {"role": "document", "content": _DOCUMENT_MARK}]
    if prompt := _default_prompt(folder):
        messages.insert(0, {"role": "system", "content": prompt})
    refused = ""
    try:
        text = "" if template is None else template.render(messages)
    except PenstockError as error:
        text, refused = "", f": {error.message}"
    before, _, rest = text.partition(_QUERY_MARK)
    between, _, after = rest.partition(_DOCUMENT_MARK)
    if _DOCUMENT_MARK not in rest:
        raise ConfigError(f"{folder}: the chat template does not write a query and then a document{refused}")
    return before, between, after


def _default_prompt(folder: Path) -> str:
    path = folder / _SETTINGS
    fields = _read(path) if path.is_file() else {}
    prompts, name = (
        fields.get(key) if isinstance(fields, Mapping) else None for key in ("prompts", "default_prompt_name")
    )
    found = prompts.get(name) if isinstance(prompts, dict) and isinstance(name, str) else None
    return found if isinstance(found, str) else ""


def _read(path: Path) -> Any:
    if path.stat().st_size > _MAX_FILE_BYTES:
        raise ConfigError(f"{path}: has more than {_MAX_FILE_BYTES} bytes")
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{path}: is not JSON: {error}") from None
