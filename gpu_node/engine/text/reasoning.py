"""The reasoning at the start of an answer: which tokens belong to it, and what ends it at a budget."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from penstock.contract.calls.opening import CallOpening

NEVER = (1 << 31) - 1
"""A number of tokens that no choice reaches."""


@dataclass(frozen=True, slots=True)
class ReasoningRule:
    """How the answers of a chat reason: the marks around the reasoning, and what is written at the end of a budget."""

    closing: bytes
    """The mark behind the reasoning."""
    closing_ids: tuple[int, ...]
    """The tokens that end the reasoning at its budget. Their text contains the mark."""
    token_bytes: Sequence[bytes] = field(repr=False)
    """The text of each token."""
    opening: bytes = b""
    """The mark before the reasoning; empty if the prompt ends with it, so that the answer begins inside."""
    opening_id: int | None = None
    """The token of the opening mark, if it is one."""
    strips_space: bool = False
    """Whether the space before an answer's first word is no part of its text."""
    budget: int | None = None
    """Tokens of reasoning after which it is ended."""
    vocab_size: int = 0
    """Tokens that the model can choose."""
    calls: CallOpening | None = None
    """The beginning of a call, which ends reasoning without a closing mark; None if calls do not."""

    @property
    def can_precede_grammar(self) -> bool:
        """Whether the first token tells if a choice reasons, so that a grammar may describe the text behind it."""
        return not self.opening or self.opening_id is not None


class ReasoningState:
    """The position of one choice relative to its reasoning: a pure function of its tokens.

    The reasoning of a choice are its tokens from the first one to the one that completes the closing mark, or the
    beginning of a call. White space before the opening mark, or any other text, means that the choice does not reason.
    At the budget the tokens of the closing text follow, whatever the model computes, and count as reasoning. A budget
    does not end what has not begun.
    """

    __slots__ = ("_call", "_forced_from", "_num_tokens", "_rule", "_tail", "has_begun", "is_over", "num_seen")

    def __init__(self, rule: ReasoningRule) -> None:
        self._rule = rule
        self.num_seen = 0
        """Tokens of the choice so far."""
        self.has_begun = not rule.opening
        self.is_over = False
        """Whether the next token belongs to the answer."""
        self._num_tokens = 0
        self._forced_from: int | None = None
        self._tail = b""
        """The end of the text so far that may be the beginning of a mark."""
        self._call = b""
        """The end of the text so far that may be the beginning of a call."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the reasoning so far."""
        return self._num_tokens if self.has_begun else 0

    @property
    def opening_id(self) -> int | None:
        """The token that begins the reasoning, if the mark is one token."""
        return self._rule.opening_id

    @property
    def vocab_size(self) -> int:
        """Tokens that the model can choose."""
        return self._rule.vocab_size

    @property
    def first_limited(self) -> int:
        """The number of tokens of the choice from which on the next one may be forced."""
        return NEVER if self._rule.budget is None else self._rule.budget

    @property
    def forced_token(self) -> int | None:
        """The token that must come next; None if the model chooses it."""
        if self._forced_from is None or self.is_over:
            return None
        return self._rule.closing_ids[self.num_seen - self._forced_from]

    def push(self, token_ids: Iterable[int]) -> None:
        """Add the next tokens of the choice."""
        for token_id in token_ids:
            self.num_seen += 1
            if not self.is_over:
                self._take(token_id)

    def copy(self) -> Self:
        """Return a state at the same position, which further tokens of this one do not change."""
        other = type(self)(self._rule)
        for name in self.__slots__:
            setattr(other, name, getattr(self, name))
        return other

    def _take(self, token_id: int) -> None:
        rule = self._rule
        self._num_tokens += 1
        if self._forced_from is not None:
            self.is_over = self._num_tokens == self._forced_from + len(rule.closing_ids)
            return
        text = self._tail + rule.token_bytes[token_id]
        if not self.has_begun:
            if rule.strips_space and self._num_tokens == 1:
                text = text.removeprefix(b" ")
            self.has_begun = text.startswith(rule.opening)
            if not self.has_begun:
                self.is_over = not rule.opening.startswith(text)
                self._tail = text
                return
            text = text[len(rule.opening) :]
        self.is_over = rule.closing in text
        self._tail = text[-len(rule.closing) + 1 :] if len(rule.closing) > 1 else b""
        if rule.calls is not None and not self.is_over:
            self.is_over = self._opens_call(rule.calls, rule.token_bytes[token_id])
        if not self.is_over and rule.budget is not None and self._num_tokens >= rule.budget:
            self._forced_from = self._num_tokens

    def _opens_call(self, calls: CallOpening, added: bytes) -> bool:
        """Return whether a call begins in the text so far, of which this is the newest part."""
        mark, text = calls.mark_bytes, self._call + added
        at = text.find(mark)
        while at >= 0:
            # A character that is not whole yet can only belong to the name.
            begins = calls.is_at_start(text[at : at + calls.max_bytes].decode(errors="ignore"))
            if begins is not False:
                self._call = text[at:]
                return begins is True
            at = text.find(mark, at + 1)
        self._call = text[1 - len(mark) :]
        return False
