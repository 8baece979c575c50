"""Masks of the tokens that a choice may continue with, inside a grammar worker."""

from __future__ import annotations

import ctypes
from array import array
from typing import TYPE_CHECKING

from penstock.gpu_node.engine.structured.compiling import Compiler, is_past_limits
from penstock.gpu_node.engine.structured.mask_status import EMPTY, MISFIT, PAST_LIMITS, UNKNOWN, WRITTEN

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_WORD_BYTES = 4


class Matching:
    """The matchers of one worker's choices, by the choice's number."""

    def __init__(self, tokenizer: LLTokenizer, compiler: Compiler) -> None:
        self._tokenizer = tokenizer
        self._compiler = compiler
        self._matchers: dict[int, LLMatcher] = {}
        self._num_words = -(-tokenizer.vocab_size // (8 * _WORD_BYTES))
        self._words = (ctypes.c_uint32 * self._num_words)()

    def mask(self, guide_id: int, grammar_id: int, is_new: bool, token_ids: bytes) -> tuple[int, bytes]:
        """Advance a choice by some tokens (int32); return a mask status, and the next mask or the reason for none.

        `is_new`: the choice has no matcher here yet, so it starts at the beginning of its text.
        """
        matcher = self._compiler.copy(grammar_id) if is_new else self._matchers.get(guide_id)
        if matcher is None:
            return UNKNOWN, b""
        self._matchers[guide_id] = matcher
        if token_ids and not matcher.consume_tokens(array("i", token_ids).tolist()):
            return (PAST_LIMITS if is_past_limits(matcher) else MISFIT), _reason(matcher)
        matcher.unsafe_compute_mask_ptr(ctypes.addressof(self._words), ctypes.sizeof(self._words))
        if matcher.is_error():
            return PAST_LIMITS, _reason(matcher)
        mask = bytes(self._words)
        if not mask.strip(b"\0"):
            return EMPTY, b""
        only = _only_bit(mask)
        return WRITTEN, self._spelled(matcher) if only is not None and self._is_mistaken(matcher, only) else mask

    def close(self, guide_id: int) -> None:
        """Drop a choice's matcher."""
        self._matchers.pop(guide_id, None)

    def _is_mistaken(self, matcher: LLMatcher, token_id: int) -> bool:
        """Whether the only token that the mask allows does not fit."""
        return (
            self._tokenizer.is_special_token(token_id)
            # Where a text may end, allowing the end token is right, though validation does not accept it.
            and not matcher.is_accepting()
            and not matcher.validate_tokens([token_id])
        )

    def _spelled(self, matcher: LLMatcher) -> bytes:
        """Return a mask of the ordinary token that continues the forced text.

        llguidance tokenizes forced text like a prompt, so the name of a special token becomes that token. A special
        token adds no text, and may end the text early.
        """
        forced = matcher.compute_ff_bytes().decode(errors="ignore")
        mask = bytearray(self._num_words * _WORD_BYTES)
        for token_id in self._tokenizer.greedy_tokenize(forced)[:1]:
            mask[token_id // 8] |= 1 << token_id % 8
        return bytes(mask)


def _reason(matcher: LLMatcher) -> bytes:
    return (matcher.get_error() or "unknown").splitlines()[0].encode()[:500]


def _only_bit(mask: bytes) -> int | None:
    """Return the position of the only set bit; None if there is not exactly one."""
    whole = int.from_bytes(mask, "little")
    return None if not whole or whole & (whole - 1) else whole.bit_length() - 1
