"""The node's record of each choice that must match a grammar: its tokens, and the masks that a step waits for.

Nothing here decides which tokens may come next: a process of `worker.py` does, with the choice's matcher. `host.py`
decides when to ask it for a mask, and how long a step waits.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from penstock.contract.errors import PenstockError
from penstock.gpu_node.model.protocol import TokenMasks

if TYPE_CHECKING:
    from penstock.gpu_node.engine.structured.process import Worker
    from penstock.gpu_node.engine.structured.tenant_grammar import Grammar
    from penstock.gpu_node.engine.text.reasoning import ReasoningState

_numbers = itertools.count(1)
_NOTHING_FORCED: Mapping[int, int] = MappingProxyType({})


class Guide:
    """The node's side of one constrained choice. Its matcher is in a worker; any worker can rebuild it from the tokens.

    -1 <= mask_at <= asked_at <= len(tokens): the numbers of tokens before the newest mask and the newest request. The
    tokens are those of the text that the grammar describes; the choice may reason before it.
    """

    def __init__(
        self,
        grammar: Grammar,
        vocab_size: int,
        on_end: Callable[[Guide], None],
        reasoning: ReasoningState | None = None,
    ) -> None:
        """`reasoning`: the start of a choice that may reason before the text."""
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
        self._reasoning = reasoning
        self._on_end = on_end

    def __del__(self) -> None:
        self._on_end(self)

    @property
    def is_waiting(self) -> bool:
        """Whether its mask is requested and has not arrived."""
        return self.failure is None and self.asked_at > self.mask_at

    @property
    def is_idle(self) -> bool:
        """Whether the choice still reasons, so that any token but an end token may follow."""
        reasoning = self._reasoning
        return reasoning is not None and reasoning.has_begun and not reasoning.is_over

    @property
    def opening_id(self) -> int | None:
        """The token that may begin the reasoning now, beside the tokens that the grammar allows."""
        reasoning = self._reasoning
        return None if reasoning is None or reasoning.num_seen else reasoning.opening_id

    def new_tokens_of(self, output: NDArray[np.int32]) -> list[int]:
        """Return the tokens at the end of a choice's text that earlier calls did not return, for `take`."""
        new_tokens: list[int] = output[self._num_seen :].tolist()
        self._num_seen = len(output)
        return new_tokens if self._reasoning is None else _after(self._reasoning, new_tokens)

    def take(self, token_ids: Sequence[int]) -> None:
        """Append tokens. Tokens that do not fit fail the choice when its next mask is due."""
        self.tokens.extend(token_ids)

    def masks_of(self, guided: Sequence[Guide | None], forced: Mapping[int, int] = _NOTHING_FORCED) -> GuidedMasks:
        """Return the masks of a step in which this guide takes part. `forced`: the only token of other rows."""
        return GuidedMasks(guided, forced)


def _after(reasoning: ReasoningState, token_ids: list[int]) -> list[int]:
    """Push a choice's next tokens; return those that do not belong to its reasoning."""
    for at, token_id in enumerate(token_ids):
        if reasoning.is_over:
            return token_ids[at:]
        reasoning.push((token_id,))
        if not reasoning.has_begun:
            return token_ids[at:]
    return []


class GuidedMasks(TokenMasks):
    """The masks of a step's constrained rows, and which of them are late."""

    def __init__(self, guided: Sequence[Guide | None], forced: Mapping[int, int] = _NOTHING_FORCED) -> None:
        """`guided`: by sampling row, its guide or None. At least one row has a guide; guides have taken all tokens.

        `forced`: the only token of each row, of those without a guide, that has just one.
        """
        found = {row: guide for row, guide in enumerate(guided) if guide is not None}
        self._masked_rows = sorted({*found, *forced})
        """The sampling row of each row of `words`."""
        is_masked = np.zeros(len(guided), dtype=np.bool_)
        is_masked[self._masked_rows] = True
        super().__init__(is_masked, next(iter(found.values())).vocab_size)
        self.allow_only(forced)
        self.guides = {guide: int(self.rows[row]) for row, guide in found.items()}
        """The guides, and the row of `words` of each."""
        self.waiting: dict[Guide, int] = {}
        """Guides without a mask yet, and their row of `words`."""
        self.late: list[int] = []
        """Sampling rows without a mask in time. They sample nothing in this step, and no error is raised."""
        self._openings = {row: one for guide, row in self.guides.items() if (one := guide.opening_id) is not None}

    @property
    def has_other_rows(self) -> bool:
        """Whether the step has rows that do not wait for a mask."""
        return len(self.waiting) < len(self.rows)

    def put(self, row: int, mask: bytes) -> None:
        """Write the mask of a row of `words`."""
        words = np.frombuffer(mask, np.uint32)[: self.words.shape[1]]
        self.words[row, : len(words)] = words
        if (token_id := self._openings.get(row)) is not None:
            self.allow(row, token_id)

    def give_up_waiting(self) -> None:
        """Let the step continue without the rows that still wait."""
        self.late = sorted(self._masked_rows[row] for row in self.waiting.values())
        self.finish()


def late_rows(masks: TokenMasks | None) -> Sequence[int]:
    """Return a finished step's sampling rows without a mask in time."""
    return masks.late if isinstance(masks, GuidedMasks) else ()
