"""Who drafts how many tokens: as many as will probably stand often enough for what they cost."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from penstock.gpu_node.engine.lookup import MATCHES, PromptLookup
from penstock.gpu_node.engine.step_cost import StepCost
from penstock.gpu_node.model.protocol import ModelRunner, StepResult

if TYPE_CHECKING:
    from penstock.gpu_node.engine.config import EngineConfig

_log = logging.getLogger(__name__)

_FIRST_ODDS = (0.25, 0.4, 0.6, 0.85)
"""That a drafted token stands, by the match that it follows, before anything is known."""
_FIRST_TRIES = 8.0
_COMMON_TRIES = 3.0
"""What all sequences' odds count for in one's own."""
_FADE = 0.85
_COMMON_FADE = 0.995
_MARGIN = 1.3
"""A drafted token must be worth so many times what it costs: plans of steps with drafts cost a little as well."""
_TRIAL_SHARE = 0.005
"""Of a step's time, for drafts that say how often drafts stand where they do not pay."""
_MAX_TRIALS = 4.0
_LOOKS = 2
"""Sequences that a step looks at for such a draft,"""
_LOOK_COST = 0.25
"""and what each of these looks counts for, in tokens drafted."""
_LEAST_TRIAL_MATCH = 2


def speculation_of(config: EngineConfig, runner: ModelRunner) -> Speculation:
    """As an engine's settings and its runner have it."""
    if config.speculative == "off":
        return Speculation(0)
    if not runner.verifies_drafts:
        _log.warning("speculative %s: this runner cannot, so nobody drafts", config.speculative)
        return Speculation(0)
    return Speculation(config.max_draft_tokens)


class Odds:
    """How often drafted tokens stood lately, by the match that they followed."""

    def __init__(self, odds: Items[float], tries: float, fade: float) -> None:
        self._stood = [one * tries for one in odds]
        self._tries = [tries] * len(odds)
        self._fade = fade

    def note(self, match: int, num_stood: int, num_tried: int) -> None:
        """So many of the drafted tokens that were looked at stood."""
        self._stood[match] = self._stood[match] * self._fade + num_stood
        self._tries[match] = self._tries[match] * self._fade + num_tried

    def among(self, others: Items[float]) -> list[float]:
        """The odds, where `others` count as a few tries more."""
        mine = zip(self._stood, self._tries, others, strict=True)
        return [(stood + _COMMON_TRIES * other) / (tries + _COMMON_TRIES) for stood, tries, other in mine]


@dataclass(slots=True)
class Drafter:
    """What is known of one sequence."""

    lookup: PromptLookup
    own: Odds = field(default_factory=lambda: Odds((0.0,) * len(MATCHES), 0.0, _FADE))
    odds: list[float] = field(default_factory=list)
    as_of: int = -1
    """How many drafts all sequences had had verified when `odds` were worked out."""
    match: int = 0
    """What the draft under way follows."""


class Speculation:
    """Weighs drafts. The largest batch that they pay in follows from what a token costs beside a whole step.

    With R sequences that decode, a token that stands spares an R-th of a step. So the j-th token of a draft is worth
    its cost while odds ** j is above what a token costs × R ÷ what a step costs.
    """

    def __init__(self, max_draft_tokens: int) -> None:
        """0: nobody drafts."""
        self.max_draft_tokens = max_draft_tokens
        self.num_drafted = self.num_accepted = 0
        self.cost = StepCost()
        self._common = Odds(_FIRST_ODDS, _FIRST_TRIES, _COMMON_FADE)
        self._common_odds = list(_FIRST_ODDS)
        self._num_verified = 0
        self._trials = 0.0
        self._turn = 0

    def note_step(self, num_tokens: int, result: StepResult) -> None:
        """A step of so many tokens was computed."""
        if self.max_draft_tokens:
            self.cost.note(num_tokens, result.forward_ms + result.sample_ms)

    def begin(self, num_decoding: int) -> float:
        """A step comes: what a drafted token's odds must be in it to pay; past 1 where none can."""
        step_ms = self.cost.step_ms(num_decoding)
        if not step_ms:
            return 2.0
        share = self.cost.token_ms / step_ms
        self._trials = min(_MAX_TRIALS, self._trials + (_TRIAL_SHARE / share if share else _MAX_TRIALS))
        return _MARGIN * share * num_decoding

    def on_trial(self, num_decoding: int) -> set[int]:
        """The few of those that decode which may draft a token though that does not pay."""
        if self._trials < 1:
            return set()
        self._turn += _LOOKS
        self._trials -= _LOOKS * _LOOK_COST
        return {at % num_decoding for at in range(self._turn, self._turn + _LOOKS)}

    def pays(self, drafter: Drafter, least_odds: float) -> bool:
        """Whether a sequence would draft if it found the best of matches."""
        return max(self._odds_of(drafter)) >= least_odds

    def draft(self, drafter: Drafter, news: NDArray[np.int32], room: int, least_odds: float) -> list[int]:
        """Up to `room` tokens that a sequence will probably say next; `news` it said since it was asked last."""
        room = min(room, self.max_draft_tokens)
        drafter.lookup.extend(news)
        at, drafter.match = drafter.lookup.find()
        if not at:
            return []
        odds, count, likely = self._odds_of(drafter)[drafter.match], 0, 1.0
        while count < room and (likely := likely * odds) >= least_odds:
            count += 1
        if not count and drafter.match >= _LEAST_TRIAL_MATCH and self._trials >= 1:
            self._trials -= 1
            count = 1
        return drafter.lookup.following(at, count) if count else []

    def _odds_of(self, drafter: Drafter) -> list[float]:
        if drafter.as_of != self._num_verified:
            drafter.odds, drafter.as_of = drafter.own.among(self._common_odds), self._num_verified
        return drafter.odds

    def verified(self, drafter: Drafter, num_drafted: int, num_accepted: int) -> None:
        """A step said which of the tokens drafted last stand."""
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        self._num_verified += 1
        outcome = drafter.match, num_accepted, min(num_accepted + 1, num_drafted)
        drafter.own.note(*outcome)
        self._common.note(*outcome)
        self._common_odds = self._common.among(_FIRST_ODDS)
