"""The output of one choice: decodes its tokens to text, and finds its end."""

from __future__ import annotations

import logging

from penstock.gpu_node.engine.text.detokenizer import Detokenizer
from penstock.gpu_node.engine.text.end_rule import EndReason, EndRule
from penstock.gpu_node.engine.text.stop_strings import StopStrings

_log = logging.getLogger(__name__)


class ChoiceOutput:
    """Decodes one choice's tokens to text, and finds the choice's end.

    A pure function of the tokens: text and end do not depend on how the tokens are split over steps, processes and
    resumes. Stop strings are searched only in text that begins once there are `min_tokens` tokens.
    """

    def __init__(
        self, rule: EndRule, stops: tuple[str, ...], detokenizer: Detokenizer, *, includes_stop: bool = False
    ) -> None:
        """`includes_stop`: the stop string or stop token that ends the choice stays in its text."""
        self.num_tokens = 0
        self.finish_reason: EndReason | None = None
        self._rule = rule
        self._detokenizer = detokenizer
        self._includes_stop = includes_stop
        self._stops = StopStrings(stops, included=includes_stop)
        self._num_unstopped = rule.min_tokens - 1 if stops else rule.max_tokens
        """Number of leading tokens with text that no stop string can end."""
        self._released: list[str] = []

    def push(self, token_id: int) -> None:
        """Add one token; `finish_reason` is set if it was the last one.

        If the tokenizer's library fails at it, this choice ends with an error and others continue.
        """
        self.num_tokens += 1
        try:
            self._take(token_id)
        except Exception:
            _log.exception("a choice's tokens could not be decoded")
            self.finish_reason = "error"

    def fail(self) -> None:
        """End the choice because its computation failed."""
        self._finish("error")

    def take_text(self) -> str:
        """Return the text released since the last call."""
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
        """Release the text held back and end the choice. The reason is stop if that text completes a stop string."""
        stopped = self._stopped_by(self._detokenizer.flush())
        if not stopped:
            self._released.append(self._stops.flush())
        self.finish_reason = "stop" if stopped and reason != "error" else reason
