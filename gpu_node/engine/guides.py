"""Texts of a given form: forms are compiled here, and their guides' masks written by a thread of their own.

llguidance keeps to the form; its state is a function of a choice's tokens alone, so any node can go on with it.
"""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from cachetools import LRUCache

from penstock.contract.errors import RequestError
from penstock.contract.structured import StructuredOutputs
from penstock.contract.tools import WantedCalls
from penstock.gpu_node.engine.call_grammar import CallGrammar
from penstock.gpu_node.engine.guide import Guide, GuidedMasks
from penstock.gpu_node.engine.tokenizer import Tokenizer
from penstock.gpu_node.model.protocol import TokenMasks

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

_MAX_COMPILED = 128
_COMPACT: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as most models write it by themselves; where any space is allowed, some write nothing else to the limit."""


class Guides:
    """Makes guides for one model. `prepare` may be called from any thread."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._compiled: LRUCache[StructuredOutputs, LLMatcher] = LRUCache(_MAX_COMPILED)
        self._lock = threading.Lock()
        self._ll_tokenizer: LLTokenizer | None = None
        # One thread, so that a choice takes its tokens in their order.
        self._thread = ThreadPoolExecutor(1, "penstock-masks")

    def prepare(self, wanted: StructuredOutputs) -> None:
        """Compile a form, so that `new_guide` has it at hand. Raises RequestError for one that cannot be kept to."""
        self._matcher_of(wanted)

    def new_guide(self, wanted: StructuredOutputs) -> Guide:
        """A guide at the start of a text. Raises RequestError like `prepare`."""
        matcher, tokenizer = self._matcher_of(wanted)
        return Guide(matcher.deep_copy(), tokenizer, self._vocab_size)

    def write(self, masks: TokenMasks | None) -> None:
        """Begin to write a step's masks, which goes on while it runs."""
        if not isinstance(masks, GuidedMasks):
            return
        try:
            self._thread.submit(masks.write)
        except RuntimeError:  # the interpreter ends, but the step that waits for them must still end before it
            masks.write()

    def _matcher_of(self, wanted: StructuredOutputs) -> tuple[LLMatcher, LLTokenizer]:
        """A form at the start of a text, which nobody changes. It may be forgotten as soon as it is found."""
        with self._lock:
            matcher, tokenizer = self._compiled.get(wanted), self._tokenizer_of_guides()
        if matcher is None:
            matcher = self._compile(wanted, tokenizer)
            with self._lock:
                self._compiled[wanted] = matcher
        return matcher, tokenizer

    def _compile(self, wanted: StructuredOutputs, tokenizer: LLTokenizer) -> LLMatcher:
        if wanted.calls is not None:
            if wanted.calls.answer is not None:
                self._compile(StructuredOutputs(json_schema=wanted.calls.answer), tokenizer)
            return self._compile_calls(wanted.calls, tokenizer)
        field = _field_of(wanted)
        try:
            return _matcher(_grammar_of(wanted), tokenizer)
        except ValueError as error:
            param = f"structured_outputs.{field}"
            raise RequestError(f"{param}: cannot be kept to: {error}", param=param) from None

    def _compile_calls(self, wanted: WantedCalls, tokenizer: LLTokenizer) -> LLMatcher:
        from llguidance import LLMatcher

        def token_of(mark: str) -> int | None:
            token_id = self._tokenizer.id_of(mark)
            return token_id if token_id is not None and tokenizer.is_special_token(token_id) else None

        def matcher(calls: WantedCalls) -> LLMatcher:
            grammar = CallGrammar(calls, token_of, _COMPACT).lark()
            return _matcher(LLMatcher.grammar_from_lark(grammar), tokenizer)

        def refusal(at_fault: str, error: ValueError) -> RequestError:
            # The lines behind the first show a grammar that the caller does not know.
            return RequestError(f"tools: {at_fault} cannot be kept to: {str(error).splitlines()[0]}", param="tools")

        try:
            return matcher(wanted)
        except ValueError as error:
            for function in wanted.functions:
                try:
                    matcher(wanted.model_copy(update={"functions": (function,)}))
                except ValueError as own:
                    raise refusal(f"the parameters of {function.name!r}", own) from None
            raise refusal("they", error) from None

    def _tokenizer_of_guides(self) -> LLTokenizer:
        """One for all, made when it is first needed; under the lock."""
        self._ll_tokenizer = self._ll_tokenizer or self._new_ll_tokenizer()
        return self._ll_tokenizer

    def _new_ll_tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        if not self._eos_token_ids:
            raise RequestError("this model has no token that ends a text", param="structured_outputs")
        try:
            return LLTokenizer(self._tokenizer.to_json(), n_vocab=self._vocab_size, eos_token=self._eos_token_ids)
        except Exception as error:
            # A tokenizer of unknown origin through a foreign parser: it may fail in any way.
            raise RequestError(
                f"this model's tokenizer cannot be guided: {error}", param="structured_outputs"
            ) from error


def _field_of(wanted: StructuredOutputs) -> str:
    """The field that says it."""
    fields = ("regex", "choice", "grammar", "json_schema")
    return next((field for field in fields if getattr(wanted, field) is not None), "json_object")


def _grammar_of(wanted: StructuredOutputs) -> str:
    """It in llguidance's notation. Raises ValueError for a schema that is nested too deeply."""
    from llguidance import LLMatcher

    if wanted.regex is not None:
        return LLMatcher.grammar_from_regex(wanted.regex)
    if wanted.choice is not None:
        alternatives = " | ".join(json.dumps(text, ensure_ascii=False) for text in wanted.choice)
        return LLMatcher.grammar_from_lark(f"start: {alternatives}")
    if wanted.grammar is not None:
        return LLMatcher.grammar_from_lark(wanted.grammar)
    return LLMatcher.grammar_from_json_schema(wanted.json_schema or '{"type": "object"}', overrides=_COMPACT)


def _matcher(grammar: str, tokenizer: LLTokenizer) -> LLMatcher:
    """Raises ValueError for a grammar that cannot be kept to."""
    from llguidance import LLMatcher

    is_wrong, problems = LLMatcher.validate_grammar_with_warnings(grammar, tokenizer)
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    if is_wrong or matcher.is_error():
        raise ValueError((problems or [matcher.get_error()])[0].strip())
    trial = matcher.deep_copy()
    trial.try_consume_tokens(trial.compute_ff_tokens())
    trial.compute_bitmask()
    if trial.is_error():
        # A grammar of which nothing can be derived, or with a beginning that is past the library's limits.
        raise ValueError(f"no text can begin so: {trial.get_error().splitlines()[0]}")
    return matcher
