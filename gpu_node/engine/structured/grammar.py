"""What the node knows of a tenant's grammar: its text, its trial and its cost; and of each choice that must match it.

Nothing here decides which tokens may come next: a process of `worker.py` does, with the choice's matcher. `host.py`
decides when to ask it for a mask, and how long a step waits.
"""

from __future__ import annotations

import itertools
import re
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from penstock.contract.errors import PenstockError
from penstock.gpu_node.model.protocol import TokenMasks

if TYPE_CHECKING:
    from penstock.gpu_node.engine.structured.process import Worker


MAX_REASON_CHARS = 500


_WORDS = tuple(
    (re.compile(pattern), words)
    for pattern, words in (
        (r"Unimplemented keys: \[(.*)\]", r"keywords that cannot be enforced: \1"),
        (r"oneOf constraints are not supported", "the branches of a oneOf may match the same value; use anyOf"),
        (r"Resource '(.*?)' is not present in a registry", r"$ref '\1' leads out of the schema"),
        (r"(?:Pointer|Anchor) '(.*?)' (?:does not exist|not found)", r"$ref '\1' leads nowhere"),
        (r"recursion limit exceeded", "it is nested too deeply"),
        (r"Unsatisfiable schema: (.*)", r"no value can satisfy it: \1"),
        (r"Invalid type: (.*)", r"'\1' is not a JSON type"),
        (r"Expected positive integer for '(.*?)', got (.*)", r"\1 must be a non-negative integer, not \2"),
        (r"Expected (\w+) for '(.*?)', got (.*)", r"\2 must be of type \1, not \3"),
        (
            r"min/maxProperties only supported",
            "minProperties and maxProperties need every property in properties to be required",
        ),
        (
            r"patternProperty regexes /(.*)/ and /(.*)/ are not disjoint",
            r"the patternProperties /\1/ and /\2/ may match the same name",
        ),
        (
            r"circular references with sibling keys are not supported: (.*)",
            r"the circular $ref '\1' has other keywords beside it",
        ),
        (r"Current row has (\d+) items; max is (\d+)", r"\1 parser items at one character; the limit is \2"),
    )
)


_PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\): (.*)")
"""llguidance's line and column in a grammar."""


_REGEX_ERROR = re.compile(r"^error: (.*)", re.MULTILINE)


_INVALID_REGEX = re.compile(r"^invalid regex .*")


_EBNF = "::="


def reason_of(kind: Kind, problem: str) -> str:
    """Return a problem that llguidance found, in our words; a message without a translation as it is."""
    first, regex_error = problem.partition("\n")[0], _REGEX_ERROR.search(problem)
    place = _PLACE.match(first)
    if place is not None:
        first = place[3]
    if regex_error is not None:
        found = _INVALID_REGEX.sub("", first) if kind == "lark" else ""
        first = f"{found or 'invalid regular expression'}: {regex_error[1]}"
    if place is not None and kind == "lark":
        first = f"line {place[1]}, column {place[2]}: {first}"
        if _EBNF in problem:
            first += "; a grammar must be in Lark's notation, where a rule is written name: …"
    return _in_our_words(first)[:MAX_REASON_CHARS]


def _in_our_words(message: str) -> str:
    for pattern, words in _WORDS:
        if (found := pattern.search(message)) is not None:
            return found.expand(words)
    return message


Kind = Literal["lark", "regex", "json", "calls"]
"""`calls` is Lark's notation with JSON schemas in rules of their own, as `CallGrammar` writes it."""


_numbers = itertools.count(1)


@dataclass(eq=False, slots=True, weakref_slot=True)
class Grammar:
    """A tenant's grammar that passed its trial. Guides keep it alive, even after the cache has dropped it.

    Two tenants with the same text have two of these, with numbers, accounts and refusals of their own.
    """

    kind: Kind
    text: str
    field_name: str
    """The request's field, for error messages."""
    is_costly: bool
    """Whether the worker for costly grammars serves it."""
    number: int = field(default_factory=lambda: next(_numbers))
    num_guides: int = 0
    """Number of choices that use it now."""
    memory: int = 0
    """Bytes that its worker grew by during its tasks."""
    num_slow_masks: int = 0
    """Masks that took longer than a cheap grammar's may."""
    num_masks: int = 0
    """Masks computed since `memory` was 0."""
    num_kills: int = 0
    """Workers that were killed from outside during its tasks."""
    refusal: PenstockError | None = None
    """Why no choice may continue with it."""
    refused_s: float | None = None
    """When it was refused, on the monotonic clock."""
    account_s: float = field(default_factory=time.monotonic)
    """When its account began: memory, masks and kills. After a while another one begins."""

    def refuse(self, error: PenstockError) -> None:
        """Let no choice continue with it. The first reason stays."""
        if self.refusal is None:
            self.refusal, self.refused_s = error, time.monotonic()

    def begin_account(self, now_s: float) -> None:
        """Begin another account."""
        self.account_s = now_s
        self.memory = self.num_masks = self.num_slow_masks = self.num_kills = 0

    @property
    def size(self) -> int:
        """Bytes that the cache counts for it."""
        return len(self.text.encode()) + 512


@dataclass(frozen=True, slots=True)
class TrialResult:
    """The result of a trial: the error, if any, and the index of the text at fault."""

    problem: str = ""
    part: int = 0
    is_costly: bool = False
    is_too_costly: bool = False
    """Whether a limit is the reason. Without a `problem`, the limit killed the trial's worker."""
    is_killed: bool = False
    """Whether its workers were killed from outside too often. Another trial may succeed later."""


class Guide:
    """The node's side of one constrained choice. Its matcher is in a worker; any worker can rebuild it from the tokens.

    -1 <= mask_at <= asked_at <= len(tokens): the numbers of tokens before the newest mask and the newest request.
    """

    def __init__(self, grammar: Grammar, vocab_size: int, on_end: Callable[[Guide], None]) -> None:
        self.grammar = grammar
        self.vocab_size = vocab_size
        self.number = next(_numbers)
        self.tokens = array("i")
        self.worker: Worker | None = None
        """The worker with its matcher, which has consumed the first `asked_at` tokens."""
        self.asked_at = -1
        self.mask_at = -1
        self.mask = b""
        self.cpu_s = 0.0
        """Processor time of its masks so far."""
        self.is_slow = False
        """Whether its last mask took so long that a step should not wait for the next one."""
        self.rebuilt_at = -1
        """Number of tokens at which its matcher was last rebuilt, after it had exceeded a limit."""
        self.failure: PenstockError | None = None
        """Why its choice cannot continue."""
        self._num_seen = 0
        self._on_end = on_end

    def __del__(self) -> None:
        self._on_end(self)

    @property
    def is_waiting(self) -> bool:
        """Whether its mask is requested and has not arrived."""
        return self.failure is None and self.asked_at > self.mask_at

    def new_tokens_of(self, output: NDArray[np.int32]) -> list[int]:
        """Return the tokens at the end of a choice's output that earlier calls did not return, for `take`."""
        new_tokens: list[int] = output[self._num_seen :].tolist()
        self._num_seen = len(output)
        return new_tokens

    def take(self, token_ids: Sequence[int]) -> None:
        """Append tokens. Tokens that do not fit fail the choice when its next mask is due."""
        self.tokens.extend(token_ids)


class GuidedMasks(TokenMasks):
    """The masks of a step's constrained rows, and which of them are late."""

    def __init__(self, guided: Sequence[Guide | None]) -> None:
        """`guided`: by sampling row, its guide or None. At least one row has a guide; guides have taken all tokens."""
        self.guides = [guide for guide in guided if guide is not None]
        self.waiting: dict[Guide, int] = {}
        """Guides without a mask yet, and their row of `words`."""
        self.late: list[int] = []
        """Sampling rows without a mask in time. They sample nothing in this step, and no error is raised."""
        self._guided_rows = [i for i, guide in enumerate(guided) if guide is not None]
        super().__init__(np.array([guide is not None for guide in guided]), self.guides[0].vocab_size)

    @property
    def has_other_rows(self) -> bool:
        """Whether the step has rows that do not wait for a mask."""
        return len(self.waiting) < len(self.rows)

    def put(self, row: int, mask: bytes) -> None:
        """Write the mask of a row of `words`."""
        words = np.frombuffer(mask, np.uint32)[: self.words.shape[1]]
        self.words[row, : len(words)] = words

    def give_up_waiting(self) -> None:
        """Let the step continue without the rows that still wait."""
        self.late = sorted(self._guided_rows[row] for row in self.waiting.values())
        self.finish()


def late_rows(masks: TokenMasks | None) -> Sequence[int]:
    """Return a finished step's sampling rows without a mask in time."""
    return masks.late if isinstance(masks, GuidedMasks) else ()
