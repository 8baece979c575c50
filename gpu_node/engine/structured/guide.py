"""One choice whose text has to match a grammar, and the masks that a step waits for."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from penstock.contract.errors import PenstockError
from penstock.gpu_node.model.protocol import TokenMasks

if TYPE_CHECKING:
    from penstock.gpu_node.engine.structured.grammar import Grammar
    from penstock.gpu_node.engine.structured.process import Worker

_numbers = itertools.count(1)


class Guide:
    """The node's side of one choice. The matcher is in a worker; any worker can rebuild it from the tokens.

    -1 <= mask_at <= asked_at <= len(tokens): the number of tokens that the newest mask and the newest request are for.
    """

    def __init__(self, grammar: Grammar, vocab_size: int, on_end: Callable[[Guide], None]) -> None:
        self.grammar = grammar
        self.vocab_size = vocab_size
        self.number = next(_numbers)
        self.tokens = array("i")
        self.worker: Worker | None = None
        """Has its matcher, which took all tokens up to asked_at."""
        self.asked_at = -1
        self.mask_at = -1
        self.mask = b""
        self.cpu_s = 0.0
        """Processor time of its masks."""
        self.is_slow = False
        """Whether its last mask took so long that a step should not wait for the next one."""
        self.rebuilt_at = -1
        """The number of tokens at which its matcher was last rebuilt, for it had passed a limit."""
        self.failure: PenstockError | None = None
        """Why its choice cannot go on."""
        self._num_seen = 0
        self._on_end = on_end

    def __del__(self) -> None:
        self._on_end(self)

    @property
    def is_waiting(self) -> bool:
        """Whether its mask is asked for and not there yet."""
        return self.failure is None and self.asked_at > self.mask_at

    def news_of(self, output: NDArray[np.int32]) -> list[int]:
        """The tokens of a choice's output that were not asked for before, for `take`."""
        news: list[int] = output[self._num_seen :].tolist()
        self._num_seen = len(output)
        return news

    def take(self, token_ids: Sequence[int]) -> None:
        """Go on by some tokens. Tokens that do not fit fail the choice when its next mask is due."""
        self.tokens.extend(token_ids)


class GuidedMasks(TokenMasks):
    """Masks of the rows that have a guide, and which of these rows are late."""

    def __init__(self, guided: Sequence[Guide | None]) -> None:
        """By sampling row: its guide, which has taken all tokens; at least one row has one."""
        self.guides = [guide for guide in guided if guide is not None]
        self.waiting: dict[Guide, int] = {}
        """Guides whose mask is not there yet, and their row of `words`."""
        self.late: list[int] = []
        """Sampling rows whose mask was not there in time: they can choose nothing, and nothing is wrong with them."""
        self._places = [i for i, guide in enumerate(guided) if guide is not None]
        super().__init__(np.array([guide is not None for guide in guided]), self.guides[0].vocab_size)

    @property
    def has_other_rows(self) -> bool:
        """Whether rows of the step do not wait for a mask."""
        return len(self.waiting) < len(self.rows)

    def put(self, row: int, mask: bytes) -> None:
        """Write a row's mask."""
        words = np.frombuffer(mask, np.uint32)[: self.words.shape[1]]
        self.words[row, : len(words)] = words

    def give_up_waiting(self) -> None:
        """Let the step go on without the rows that still wait."""
        self.late = sorted(self._places[row] for row in self.waiting.values())
        self.finish()


def late_rows(masks: TokenMasks | None) -> Sequence[int]:
    """The sampling rows of a step that is done whose mask came too late for it."""
    return masks.late if isinstance(masks, GuidedMasks) else ()
