"""Which tokens may come next in a text of a given form, worked out beside the step that samples them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from penstock.gpu_node.model.protocol import TokenMasks

if TYPE_CHECKING:
    from llguidance import LLMatcher

_log = logging.getLogger(__name__)


class Guide:
    """What one choice may still say."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._matcher = matcher
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
        """Set the bits of the tokens that may come next; of none once something did not fit."""
        if not self._matcher.is_error():
            self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)


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
