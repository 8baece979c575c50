"""From the text of a grammar to llguidance's matcher, inside a grammar worker."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, LLParserLimits

from penstock.gpu_node.engine.structured import limits

if TYPE_CHECKING:
    from llguidance import LLTokenizer
    from llguidance._lib import JsonCompileOptions

COMPACT: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as most models write it by themselves; where any space is allowed, some write nothing else to the limit."""

_LIMIT_REASONS = ("ParserTooComplex", "LexerTooComplex")
_LIMIT_WORDS = ("too many", "too large", "too complex", "max is", "fuel exhausted")
_TRIAL_MASKS = 4


class LimitError(ValueError):
    """A grammar got past a limit of work."""


class Compiler:
    """The compiled grammars of one worker, by the number that the node gives them."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer
        self._compiled: dict[int, LLMatcher] = {}
        self._limits = LLParserLimits(
            step_lexer_fuel=limits.STEP_LEXER_FUEL,
            initial_lexer_fuel=limits.INITIAL_LEXER_FUEL,
            max_lexer_states=limits.MAX_LEXER_STATES,
            step_max_items=limits.STEP_MAX_ITEMS,
            verbose_errors=False,
        )

    def compile(self, grammar_id: int, kind: str, text: str) -> str:
        """Keep a grammar's matcher; why it has none, or nothing."""
        try:
            self._compiled[grammar_id] = self.matcher(kind, text)
        except ValueError as error:
            return str(error)
        return ""

    def copy(self, grammar_id: int) -> LLMatcher | None:
        """A matcher at the start of a text; None for a grammar that is not kept."""
        matcher = self._compiled.get(grammar_id)
        return None if matcher is None else matcher.deep_copy()

    def forget(self, grammar_id: int) -> None:
        """Let go of a grammar."""
        self._compiled.pop(grammar_id, None)

    def matcher(self, kind: str, text: str) -> LLMatcher:
        """A matcher at the start of a text.

        Raises ValueError for a grammar that cannot be kept to, LimitError for one that is too much work.
        """
        matcher = LLMatcher(self._tokenizer, _grammar(kind, text), log_level=0, limits=self._limits)
        if matcher.is_error():
            raise problem_of(matcher)
        return matcher


class Trial:
    """Tries out a new grammar: whether it compiles, and what its first masks cost."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler
        self._worst_s = 0.0

    def run(self, kind: str, texts: list[str]) -> tuple[str, int, bool, float]:
        """What is wrong, with which text, whether a limit says so, and the processor time of the costliest mask.

        The first text is tried. Where it is wrong, the others are its parts, of which the first wrong one is named.
        """
        try:
            self._try(kind, texts[0])
        except ValueError as error:
            for i, part in enumerate(texts[1:], 1):
                try:
                    self._try(kind, part)
                except ValueError as own:
                    return str(own), i, isinstance(own, LimitError), self._worst_s
            return str(error), 0, isinstance(error, LimitError), self._worst_s
        return "", 0, False, self._worst_s

    def _try(self, kind: str, text: str) -> None:
        matcher = self._compiler.matcher(kind, text)
        matcher.try_consume_tokens(matcher.compute_ff_tokens())
        for i in range(_TRIAL_MASKS):
            began_s = time.process_time()
            mask = matcher.compute_bitmask()
            self._worst_s = max(self._worst_s, time.process_time() - began_s)
            if matcher.is_error() and not i:
                # A grammar of which nothing can be derived, or with a beginning that is past the limits.
                raise problem_of(matcher, "no text can begin so: ")
            if matcher.is_error() or matcher.is_stopped() or not matcher.try_consume_tokens([_some_bit(mask, i)]):
                return


def problem_of(matcher: LLMatcher, said: str = "") -> ValueError:
    """What is wrong with a matcher that has failed."""
    message = matcher.get_error().strip()
    kind = LimitError if is_past_limits(matcher) else ValueError
    return kind(said + (message.splitlines()[0] if said else message))


def is_past_limits(matcher: LLMatcher) -> bool:
    """Whether a matcher has failed for the work that its grammar takes; not all of its failures have their reason."""
    message = matcher.get_error()
    return matcher.stop_reason() in _LIMIT_REASONS or any(words in message for words in _LIMIT_WORDS)


def _some_bit(mask: bytes, i: int) -> int:
    """A token that a mask allows, always the same."""
    set_bytes = [at for at, byte in enumerate(mask) if byte]
    at = set_bytes[len(set_bytes) * (i + 1) // (_TRIAL_MASKS + 2)] if set_bytes else 0
    return at * 8 + mask[at].bit_length() - 1 if set_bytes else 0


def _grammar(kind: str, text: str) -> Any:
    """A text in llguidance's notation. Raises ValueError for a schema that is nested too deeply."""
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if kind == "lark":
        return LLMatcher.grammar_from_lark(text)
    return LLMatcher.grammar_from_json_schema(text, overrides=COMPACT)
