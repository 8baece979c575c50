"""Tasks: what a job may ask of a node instead of generated text, and the outputs of these jobs.

A job without a task generates text. Its kind is `generate`; a task is named by its own kind. The kind is in the job's
request, and a pool's record lists the kinds that its nodes know.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias, get_args

from pydantic import AfterValidator, Field, StringConstraints
from pydantic_core import PydanticCustomError

from penstock.contract.fields import CheckedInput, Text, TokenId

GENERATE = "generate"
SCORE = "score"
QUERY = "query"
"""How errors of a `Score` name its prompt, which belongs to all of its texts."""
MAX_TASK_TOKENS = 1 << 20
"""Tokens of a task's prompt."""
MAX_TASK_BYTES = 8 << 20
"""Bytes of a task's text."""
MAX_OUTPUT_BYTES = 15 << 20
"""Bytes of a task's packed output. A result has at most 16 MiB."""
MAX_DIMENSIONS = 1 << 16
"""Dimensions of an embedding that a request may ask for. The model's hidden size is the limit that matters."""

WHOLE_CONTEXT = -1
"""The value of `truncate_prompt_tokens` that stands for the length of the model's context."""

MAX_TEXTS_OF_JOB = 64
"""Most texts of one job for an encoder, which are about one of its steps."""
MAX_TEXT_BYTES_OF_JOB = 48 << 10
"""Bytes of text above which the texts of a caller go to several jobs: about four steps of an encoder."""

TaskText: TypeAlias = Text | Annotated[tuple[TokenId, ...], Field(min_length=1)]
"""A further text of a task, or its token ids."""
PromptName: TypeAlias = Annotated[str, StringConstraints(min_length=1, max_length=64)]

TruncationSide: TypeAlias = Literal["left", "right"]
InputType: TypeAlias = Literal[
    "search_query",
    "search_document",
    "query",
    "passage",
    "document",
    "classification",
    "clustering",
    "retrieval.query",
    "retrieval.passage",
    "separation",
    "text-matching",
]
"""What a text is embedded for, in the words of Cohere, Jina and others."""
_QUERY_PROMPTS = "query", "search_query", "retrieval.query"
_DOCUMENT_PROMPTS = "document", "passage", "search_document", "retrieval.passage"

Pooling: TypeAlias = Literal["mean", "last", "cls"]
"""How the hidden states of a prompt become one vector: their mean, that of the last token, or that of the first."""


class TaskOptions(CheckedInput):
    """Base of tasks."""

    num_sequences: ClassVar[int] = 0
    """Sequences that the job occupies in an engine. A job without sequences needs no KV cache."""

    def sampling(self) -> dict[str, Any]:
        """Return the sampling parameters of the job's sequences, where they are not the defaults."""
        return {}


class Tokenize(TaskOptions):
    """Return the tokens of a text or a chat.

    - `add_special_tokens`: add the special tokens that the model expects around a text. None: do so for a text, but not
      for a chat, whose template contains them.
    - `add_generation_prompt`: end a chat where the assistant's answer begins.
    - `return_tokens`: return the tokens, not only their number.
    - `return_token_strs`: also return the tokens as the vocabulary spells them.
    - `return_spans`: also return where in the text each token stands.
    """

    kind: Literal["tokenize"] = "tokenize"
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    return_tokens: bool = True
    return_token_strs: bool = False
    return_spans: bool = False


class Detokenize(TaskOptions):
    """Return the text of tokens, special tokens included."""

    kind: Literal["detokenize"] = "detokenize"


def _not_zero(num_tokens: int) -> int:
    if num_tokens == 0:
        raise PydanticCustomError("no_tokens", "must be at least 1, or -1 for the length of the model's context")
    return num_tokens


TruncatedTokens = Annotated[int, Field(ge=WHOLE_CONTEXT, le=MAX_TASK_TOKENS), AfterValidator(_not_zero)]
"""A number of tokens to keep, or WHOLE_CONTEXT."""

TextTokens = Annotated[int, Field(ge=1, le=MAX_TASK_TOKENS)]
"""A number of tokens to keep of one text of a pair."""


class TextTask(TaskOptions):
    """Base of tasks whose prompt is a text, and which may have further texts. An encoder computes them together.

    - `texts`: further texts of the job, or their token ids. Only pools with `texts_per_job` above 1 take them.
    - `first`: the index of the job's first text among the texts of its caller, whose numbers errors name.
    - `truncate_prompt_tokens`: keep only that many tokens of a text; WHOLE_CONTEXT: as many as the model takes. Of a
      decoder these are the last ones, of an encoder the first ones with the marks around the text. Jobs in the queue
      have the number itself.
    - `truncation_side`: the end of a text that is cut off. None: of a decoder the left one, else the right one.
    """

    num_sequences: ClassVar[int] = 1

    texts: tuple[TaskText, ...] = Field(default=(), max_length=MAX_TEXTS_OF_JOB)
    first: int = Field(default=0, ge=0)
    truncate_prompt_tokens: TruncatedTokens | None = None
    truncation_side: TruncationSide | None = None

    def within(self, max_model_len: int) -> Self:
        """Return the task with a number in place of WHOLE_CONTEXT. `max_model_len`: the model's context; 0: unknown."""
        if self.truncate_prompt_tokens != WHOLE_CONTEXT:
            return self
        return self.model_copy(update={"truncate_prompt_tokens": max_model_len or None})

    def sampling(self) -> dict[str, Any]:
        """Return the parameters of a sequence that ends with its prompt."""
        return {"temperature": 0.0, "max_tokens": 1, "truncate_prompt_tokens": self.truncate_prompt_tokens}

    def index_of(self, text: int) -> int:
        """Return the caller's number of a text of the job; the prompt is its first text."""
        return self.first + text


class Embed(TextTask):
    """Return the embeddings of the prompt and of the further texts: final hidden states, pooled to one vector each.

    - `pooling`: how the hidden states become one vector. None: as the model's files say, or else `mean`.
    - `dimensions`: keep only the first dimensions of the vector and normalize it again.
    - `prompt_name`: put the model's prompt of this name before each text. None: the model's default prompt, or none.
    - `normalize`: whether vectors have length 1. None: as the model's files say. Those of a decoder always do.
    - `input_type`: what the text is embedded for. A model puts its prompt for that before the text, if it has one.
    """

    kind: Literal["embed"] = "embed"
    pooling: Pooling | None = None
    dimensions: int | None = Field(default=None, ge=1, le=MAX_DIMENSIONS)
    prompt_name: PromptName | None = None
    normalize: bool | None = None
    input_type: InputType | None = None

    @property
    def prompt_names(self) -> tuple[str, ...]:
        """The names that a model may have for the prompt of `input_type`, the likeliest one first."""
        if self.input_type is None:
            return ()
        alike = next((names for names in (_QUERY_PROMPTS, _DOCUMENT_PROMPTS) if self.input_type in names), ())
        return (self.input_type, *alike)


class Score(TextTask):
    """Return how well each of the further texts fits the prompt, by a model that reads both together.

    - `raw`: return the model's number (logit) as it is. False: its sigmoid. None: what the model's files say.
    - `max_tokens_per_query`, `max_tokens_per_doc`: keep only that many tokens of the prompt, and of each further text,
      without marks and template. `truncate_prompt_tokens` is about both together.
    """

    kind: Literal["score"] = "score"
    raw: bool | None = None
    max_tokens_per_query: TextTokens | None = None
    max_tokens_per_doc: TextTokens | None = None
    texts: tuple[TaskText, ...] = Field(min_length=1, max_length=MAX_TEXTS_OF_JOB)

    @property
    def own_limits(self) -> dict[str, int]:
        """`max_tokens_per_query` and `max_tokens_per_doc`, as far as they are given, by name."""
        named = {"max_tokens_per_query": self.max_tokens_per_query, "max_tokens_per_doc": self.max_tokens_per_doc}
        return {name: limit for name, limit in named.items() if limit is not None}


class Classify(TextTask):
    """Return the score of each of the model's labels for the prompt, and for each further text.

    - `raw`: return the model's numbers (logits) as they are, instead of probabilities.
    """

    kind: Literal["classify"] = "classify"
    raw: bool = False


Task: TypeAlias = Annotated[Tokenize | Detokenize | Embed | Score | Classify, Field(discriminator="kind")]
KINDS: tuple[str, ...] = (GENERATE, *(one.model_fields["kind"].default for one in get_args(get_args(Task)[0])))
"""The kinds of jobs that this release knows."""
DECODER_KINDS: tuple[str, ...] = tuple(kind for kind in KINDS if kind not in ("score", "classify"))
"""The kinds that a model which generates text can run."""


@dataclass(frozen=True, slots=True)
class Tokenized:
    """The output of `Tokenize`. `token_ids` is empty if only the number was requested."""

    num_tokens: int
    max_model_len: int
    token_ids: tuple[int, ...] = ()
    token_strs: tuple[str, ...] | None = None
    spans: tuple[tuple[int, int] | None, ...] | None = None
    """For each token its first character and the one after its last; None for a token that is not of the text."""


@dataclass(frozen=True, slots=True)
class Detokenized:
    """The output of `Detokenize`."""

    text: str


@dataclass(frozen=True, slots=True)
class Embedding:
    """The output of `Embed`: a vector, and the number of tokens that it represents."""

    values: tuple[float, ...]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Entity:
    """A part of a text that a model gave one label: the characters from `start` up to `end`."""

    label: str
    score: float
    start: int
    end: int
    text: str


@dataclass(frozen=True, slots=True)
class TextRows:
    """The output of a task for several texts: one row of numbers for each text, in their order.

    A row is an embedding, a score, or the scores of `labels`. Of a job with several texts this is also the output of
    `Embed`.
    """

    kind: str
    rows: tuple[tuple[float, ...], ...]
    num_tokens: tuple[int, ...]
    """The tokens of each text; of a pair, those of both texts."""
    labels: tuple[str, ...] = ()
    entities: tuple[tuple[Entity, ...], ...] = ()
    """For each text what a model that labels tokens found; such a model gives no rows."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """A document by its index among those that were given, and how well it fits the query."""

    index: int
    score: float


@dataclass(frozen=True, slots=True)
class Classification:
    """What a model that labels texts says of one text."""

    label: str
    """The label with the highest score; empty if the model labels tokens."""
    scores: Mapping[str, float]
    """The score of each label."""
    num_tokens: int
    entities: tuple[Entity, ...] = ()
    """What a model that labels tokens found in the text."""


TaskOutput = Tokenized | Detokenized | Embedding | TextRows
