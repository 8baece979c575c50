"""One choice on its way out: its tokens become text, and something ends it."""

from __future__ import annotations

import logging

from penstock.gpu_node.engine.text.detokenizer import Detokenizer
from penstock.gpu_node.engine.text.end_rule import EndReason, EndRule
from penstock.gpu_node.engine.text.stop_strings import StopStrings

_log = logging.getLogger(__name__)


class ChoiceOutput:
    """Turns one choice's tokens into released text and finds its end.

    Pure in its tokens: the same tokens give the same text and the same end, however they are split over steps,
    processes and resumes. Stop strings are looked for in text that begins once `min_tokens` are there.
    """

    def __init__(
        self, rule: EndRule, stops: tuple[str, ...], detokenizer: Detokenizer, *, includes_stop: bool = False
    ) -> None:
        """`includes_stop`: what ends the choice, a string or a token, stays in its text."""
        self.num_tokens = 0
        self.finish_reason: EndReason | None = None
        self._rule = rule
        self._detokenizer = detokenizer
        self._includes_stop = includes_stop
        self._stops = StopStrings(stops, included=includes_stop)
        self._num_unstopped = rule.min_tokens - 1 if stops else rule.max_tokens
        """Leading tokens whose text no stop string can end."""
        self._released: list[str] = []

    def push(self, token_id: int) -> None:
        """Take one token; `finish_reason` says afterwards whether it was the last.

        Where the tokenizer's library fails at it, the choice ends with an error: others wait for theirs.
        """
        self.num_tokens += 1
        try:
            self._take(token_id)
        except Exception:
            _log.exception("a choice's text cannot be made")
            self.finish_reason = "error"

    def fail(self) -> None:
        """End the choice because its computation failed."""
        self._finish("error")

    def take_text(self) -> str:
        """The text released since the last call."""
        text = "".join(self._released)
        self._released.clear()
        return text

    def _take(self, token_id: int) -> None:
        reason = self._rule.reason(token_id, self.num_tokens)
        if reason == "stop" and not self._includes_stop:
            self._finish(reason)
            return
        text = self._detokenizer.push_one(token_id)
        if self.num_tokens <= self._num_unstopped:
            self._released.append(text)
        elif self._stopped_by(text):
            self.finish_reason = "stop"
            return
        if reason is not None:
            self._finish(reason)

    def _stopped_by(self, text: str) -> bool:
        released, stopped = self._stops.push(text)
        self._released.append(released)
        return stopped

    def _finish(self, reason: EndReason) -> None:
        """End with all text that is still held, unless that text completes a stop string; an error stays one."""
        stopped = self._stopped_by(self._detokenizer.flush())
        if not stopped:
            self._released.append(self._stops.flush())
        self.finish_reason = "stop" if stopped and reason != "error" else reason
