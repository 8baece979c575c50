"""From the text of a grammar to an llguidance matcher, inside a grammar worker."""

from __future__ import annotations

import json
import re
import time
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, LLParserLimits

from penstock.gpu_node.engine.structured import limits
from penstock.gpu_node.engine.structured.schema.rewriting import OPTIONS_KEYWORD, rewritten

if TYPE_CHECKING:
    from llguidance import LLTokenizer
    from llguidance._lib import JsonCompileOptions

COMPACT: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as most models write it. If any whitespace is allowed, some models write nothing else until the limit."""

_SCHEMA_RULE = re.compile(r"(\w+: %json )(.*)")
_LIMIT_REASONS = ("ParserTooComplex", "LexerTooComplex")
_LIMIT_WORDS = ("too many", "too large", "too complex", "max is", "fuel exhausted")
_TRIAL_MASKS = 4


class LimitError(ValueError):
    """A grammar exceeded a limit of work."""


class Compiler:
    """The compiled grammars of one worker, by the grammar's number."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer
        self._compiled: dict[int, LLMatcher] = {}
        self._limits = LLParserLimits(
            step_lexer_fuel=limits.STEP_LEXER_FUEL,
            initial_lexer_fuel=limits.INITIAL_LEXER_FUEL,
            max_lexer_states=limits.MAX_LEXER_STATES,
            step_max_items=limits.STEP_MAX_ITEMS,
            max_items_in_row=limits.MAX_ITEMS_IN_ROW,
            verbose_errors=False,
        )

    def compile(self, grammar_id: int, kind: str, text: str) -> str:
        """Compile and keep a grammar; return the error, or an empty string."""
        try:
            self._compiled[grammar_id] = self.matcher(kind, text)
        except ValueError as error:
            return str(error)
        return ""

    def copy(self, grammar_id: int) -> LLMatcher | None:
        """Return a new matcher at the start of a text; None for an unknown grammar."""
        matcher = self._compiled.get(grammar_id)
        return None if matcher is None else matcher.deep_copy()

    def forget(self, grammar_id: int) -> None:
        """Drop a grammar."""
        self._compiled.pop(grammar_id, None)

    def matcher(self, kind: str, text: str) -> LLMatcher:
        """Return a matcher at the start of a text.

        Raises ValueError for a grammar that cannot be enforced, LimitError for one that takes too much work.
        """
        matcher = LLMatcher(self._tokenizer, _grammar(kind, text), log_level=0, limits=self._limits)
        if matcher.is_error():
            raise problem_of(matcher)
        return matcher


class Trial:
    """A trial of a new grammar: whether it compiles, and what its first masks cost."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler
        self._worst_s = 0.0

    def run(self, kind: str, texts: list[str]) -> tuple[str, int, bool, float]:
        """Try texts until one fails.

        Return (error, index of the faulty text, whether a limit caused it, costliest mask's processor time).
        """
        for i, text in enumerate(texts):
            try:
                self._try(kind, text)
            except ValueError as error:
                return str(error), i, isinstance(error, LimitError), self._worst_s
        return "", 0, False, self._worst_s

    def _try(self, kind: str, text: str) -> None:
        matcher = self._compiler.matcher(kind, text)
        matcher.try_consume_tokens(matcher.compute_ff_tokens())
        for i in range(_TRIAL_MASKS):
            began_s = time.process_time()
            mask = matcher.compute_bitmask()
            self._worst_s = max(self._worst_s, time.process_time() - began_s)
            if matcher.is_error() and not i:
                # No text matches the grammar, or its beginning exceeds the limits.
                raise problem_of(matcher, "no text can match its beginning: ")
            if matcher.is_error() or matcher.is_stopped() or not matcher.try_consume_tokens([_some_bit(mask, i)]):
                return


def problem_of(matcher: LLMatcher, prefix: str = "") -> ValueError:
    """Return the error of a failed matcher; with a prefix, only its first line."""
    message = matcher.get_error().strip()
    kind = LimitError if is_past_limits(matcher) else ValueError
    return kind(prefix + (message.splitlines()[0] if prefix else message))


def is_past_limits(matcher: LLMatcher) -> bool:
    """Whether a matcher failed because of a limit. Not every failure has a stop reason, so messages count too."""
    message = matcher.get_error()
    return matcher.stop_reason() in _LIMIT_REASONS or any(words in message for words in _LIMIT_WORDS)


def _some_bit(mask: bytes, i: int) -> int:
    """Return a token that the mask allows; the same one every time."""
    set_bytes = [at for at, byte in enumerate(mask) if byte]
    at = set_bytes[len(set_bytes) * (i + 1) // (_TRIAL_MASKS + 2)] if set_bytes else 0
    return at * 8 + mask[at].bit_length() - 1 if set_bytes else 0


def _grammar(kind: str, text: str) -> Any:
    """Return a grammar in llguidance's notation. Raises ValueError for a schema that cannot be enforced."""
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if kind == "lark":
        return LLMatcher.grammar_from_lark(text)
    if kind == "calls":
        return LLMatcher.grammar_from_lark("\n".join(map(_with_options, text.split("\n"))))
    return LLMatcher.grammar_from_json_schema(rewritten(text), overrides=COMPACT)


def _with_options(rule: str) -> str:
    """Return a rule of a call grammar. Rewrite its JSON schema, if it has one."""
    found = _SCHEMA_RULE.fullmatch(rule)
    if found is None:
        return rule
    head, schema = found.groups()
    return head + json.dumps(json.loads(rewritten(schema)) | {OPTIONS_KEYWORD: COMPACT})
