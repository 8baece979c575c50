"""Which tokens may come next in a text of a given form, worked out beside the step that samples them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from penstock.gpu_node.model.protocol import TokenMasks

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_log = logging.getLogger(__name__)

_WORD_BITS = 32


class Guide:
    """What one choice may still say."""

    def __init__(self, matcher: LLMatcher, tokenizer: LLTokenizer, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._matcher = matcher
        self._tokenizer = tokenizer
        self._num_given = 0

    def news_of(self, output: NDArray[np.int32]) -> list[int]:
        """The tokens of a choice's output that were not asked for before, for `take`."""
        news: list[int] = output[self._num_given :].tolist()
        self._num_given = len(output)
        return news

    def take(self, token_ids: Sequence[int]) -> bool:
        """Go on by some tokens; False when they do not fit."""
        return self._matcher.consume_tokens(list(token_ids))

    def write_mask(self, words: NDArray[np.uint32]) -> None:
        """Set the bits of the tokens that may come next; of none once something did not fit, or nothing is known."""
        if self._matcher.is_error():
            return
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():
            words.fill(0)  # past its limits it offers the end, wherever the text is
            return
        only = _only_bit(words)
        if only is not None and self._is_mistaken(only):
            words.fill(0)
            self._spell(words)

    def _is_mistaken(self, token_id: int) -> bool:
        """Whether the only token that is offered is one which does not fit."""
        return (
            self._tokenizer.is_special_token(token_id)
            # Where a text may end, what offers the end is right, and it is not among the tokens that fit.
            and not self._matcher.is_accepting()
            and not self._matcher.validate_tokens([token_id])
        )

    def _spell(self, words: NDArray[np.uint32]) -> None:
        """Set the bit of an ordinary token with which the text goes on that must come next.

        llguidance cuts such text as a tokenizer cuts prompts, where the name of a special token is that token: one
        that says nothing, and may end the text half way.
        """
        forced = self._matcher.compute_ff_bytes().decode(errors="ignore")
        for token_id in self._tokenizer.greedy_tokenize(forced)[:1]:
            words[token_id // _WORD_BITS] = np.uint32(1 << token_id % _WORD_BITS)


class GuidedMasks(TokenMasks):
    """Masks of the rows that have a guide."""

    def __init__(self, guided: Sequence[tuple[Guide, list[int]] | None]) -> None:
        """By sampling row: its guide, and the tokens that it has not taken yet; at least one row has one."""
        self._guided = [one for one in guided if one is not None]
        is_masked = np.array([one is not None for one in guided])
        super().__init__(is_masked, self._guided[0][0].vocab_size)

    def write(self) -> None:
        """Work them out."""
        try:
            for (guide, news), words in zip(self._guided, self.words, strict=True):
                guide.take(news)
                guide.write_mask(words)
        except Exception:
            # Rows without bits can choose nothing, and fail.
            _log.exception("masks were not written")
        finally:
            self.finish()


def _only_bit(words: NDArray[np.uint32]) -> int | None:
    """The place of the only bit that is set; None where it is not the only one."""
    set_words = words.nonzero()[0]
    if len(set_words) != 1:
        return None
    word = int(words[set_words[0]])
    return None if word & (word - 1) else int(set_words[0]) * _WORD_BITS + word.bit_length() - 1
