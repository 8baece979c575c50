"""The output of one choice: decodes its tokens to text, and finds its end."""

from __future__ import annotations

import codecs
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

log = logging.getLogger(__package__)


EndReason = Literal["stop", "length", "error"]


@dataclass(frozen=True, slots=True)
class EndRule:
    """Ends a choice at a token of `end_ids` after at least `min_tokens` other tokens, or at `max_tokens` tokens."""

    end_ids: frozenset[int]
    min_tokens: int
    max_tokens: int

    def reason(self, token_id: int, num_tokens: int) -> EndReason | None:
        """Return why the choice ends with `token_id` as its `num_tokens`-th token; None if it continues."""
        if token_id in self.end_ids and num_tokens > self.min_tokens:
            return "stop"
        return "length" if num_tokens >= self.max_tokens else None


class Detokenizer:
    """The text of one choice, at a constant cost per token. Bytes without a whole UTF-8 character wait for the next."""

    def __init__(self, token_bytes: Sequence[bytes], *, strip_first_space: bool = False) -> None:
        """`token_bytes[i]`: the bytes of token i; empty for special tokens."""
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip_next = strip_first_space
        self._is_plain = not strip_first_space
        """Whether no byte waits and no space is to be stripped. ASCII then bypasses the decoder, which is faster."""

    def push(self, token_ids: Iterable[int]) -> str:
        """Return the text that these tokens complete; may be empty."""
        return "".join(map(self.push_one, token_ids))

    def push_one(self, token_id: int) -> str:
        """Return the text that one token completes; may be empty."""
        piece = self._token_bytes[token_id]
        if self._is_plain and piece.isascii():
            return piece.decode()
        if self._strip_next and piece:
            self._strip_next = False
            piece = piece.removeprefix(b" ")
        text = self._decoder.decode(piece)
        self._is_plain = not (self._strip_next or self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        """Return U+FFFD for an incomplete character at the end, else an empty string."""
        return self._decoder.decode(b"", final=True)


class StopStrings:
    """Releases text up to the first stop string, and holds back text that may be the start of one.

    `included`: the stop string itself is released too. Without stop strings all text is released at once.
    """

    def __init__(self, stops: tuple[str, ...], *, included: bool = False) -> None:
        self._stops = stops
        self._included = included
        self._first_chars = frozenset(stop[0] for stop in stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Return the text that can be released, and whether a stop string follows it."""
        if not self._held and self._first_chars.isdisjoint(text):
            return text, False  # No stop string begins here.
        held = self._held + text
        found = [(at, len(stop)) for at, stop in ((held.find(stop), stop) for stop in self._stops) if at >= 0]
        if found:
            self._held = ""
            at, length = min(found)
            return held[: at + length if self._included else at], True
        keep = self._num_to_hold(held)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep], False

    def flush(self) -> str:
        """Return the text held back, at the end of the output."""
        held, self._held = self._held, ""
        return held

    def _num_to_hold(self, text: str) -> int:
        """Return the length of the longest suffix of `text` that is a prefix of a stop string."""
        longest = min(len(text), max(len(stop) for stop in self._stops) - 1)
        for length in range(longest, 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0


class BadWords:
    """The token sequences of a request's bad words, arranged so that a step looks at few of them.

    A sequence bans its last token after all its other tokens. So only the sequences whose token before the last one is
    the newest token of the text need a comparison.
    """

    def __init__(self, sequences: Iterable[tuple[int, ...]] = ()) -> None:
        self._always: list[int] = []
        """The sequences of one token."""
        self._after: dict[int, list[tuple[bytes, int]]] = {}
        """By the token before the last one: all tokens but the last as int32, and the last token."""
        self._max_tail = 0
        for *tail, last in sequences:
            if tail:
                self._after.setdefault(tail[-1], []).append((np.array(tail, dtype=np.int32).tobytes(), last))
                self._max_tail = max(self._max_tail, len(tail))
            else:
                self._always.append(last)

    def __bool__(self) -> bool:
        return bool(self._always or self._after)

    def banned_after(self, token_ids: NDArray[np.int32]) -> list[int]:
        """Return the ids that must not follow these tokens, of which there is at least one."""
        candidates = self._after.get(int(token_ids[-1]))
        if candidates is None:
            return self._always
        newest = token_ids[-self._max_tail :].tobytes()
        return self._always + [last for tail, last in candidates if newest.endswith(tail)]


NO_BAD_WORDS = BadWords()


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
            log.exception("a choice's tokens could not be decoded")
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
