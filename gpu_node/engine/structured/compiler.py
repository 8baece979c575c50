"""Structured outputs: a request's schema becomes a grammar, which is tried out once and then guides its choices.

Separate processes compile grammars and compute masks. The state of a choice is a function of its tokens alone, so any
node can continue it.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
import weakref
from concurrent.futures import Future
from copy import copy
from typing import NamedTuple

from cachetools import LRUCache

from penstock.contract.errors import PenstockError, RequestError, TooCostlyError
from penstock.contract.sampling import StructuredOutputs
from penstock.contract.tools import WantedCalls
from penstock.gpu_node.engine.structured.call_grammar import CallGrammar
from penstock.gpu_node.engine.structured.guide import Guide, GuidedMasks
from penstock.gpu_node.engine.structured.host import MaskHost
from penstock.gpu_node.engine.structured.lanes import GrammarCounts
from penstock.gpu_node.engine.structured.protocol import MAX_CALLS_MIB, TASK_WALL_S, TRIAL_CPU_S, TRIAL_MEMORY_MIB
from penstock.gpu_node.engine.structured.tenant_grammar import Grammar, Kind, TrialResult, reason_of
from penstock.gpu_node.engine.text.reasoning import ReasoningState
from penstock.gpu_node.engine.text.tokenizer import Tokenizer
from penstock.gpu_node.model.protocol import TokenMasks

MAX_CACHED_BYTES = 32 << 20
"""Limit of the cache of grammars and refusals."""
FIRST_REFUSAL_S = 120.0
"""How long a tenant's grammar is refused for the first time. After that it may be tried again."""
LONGEST_REFUSAL_S = 3600.0
"""Each further refusal of a grammar lasts twice as long, up to this."""
_MAX_REFUSED = 4096
_DEFAULT_TENANT = "default"
_Key = tuple[str, bytes]
"""A tenant and the digest of what it asks for. Tenants share no grammar: one cannot end or time another's choices."""


class _Refusal(NamedTuple):
    """A refused grammar in the cache.

    Its error is never raised itself. Each raise would add the frames of that call to its traceback, and keep them.
    """

    error: PenstockError
    refused_s: float
    """As that of a grammar."""

    @property
    def size(self) -> int:
        return len(self.error.message.encode()) + 512


class GrammarCompiler:
    """Makes guides from the structured output that requests ask for, for one model. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = sorted(eos_token_ids)
        # Before the node serves. The library holds the GIL meanwhile: 50 ms for 150,000 tokens.
        self._host = MaskHost(tokenizer.to_json(vocab_size), vocab_size, self._eos_token_ids)
        # Keyed by tenant: _Key: (tenant, digest of the text).
        self._known: LRUCache[_Key, Grammar | _Refusal] = LRUCache(MAX_CACHED_BYTES, getsizeof=lambda one: one.size)
        # Keyed by tenant: _Key.
        self._used: weakref.WeakValueDictionary[_Key, Grammar] = weakref.WeakValueDictionary()
        """Grammars that a caller of `prepare` or a guide holds, even after the cache has dropped them."""
        # Keyed by tenant: _Key.
        self._num_ended: LRUCache[_Key, int] = LRUCache(_MAX_REFUSED)
        """How many refusals of a grammar have ended."""
        # Keyed by tenant: _Key; the single flight of trials.
        self._pending: dict[_Key, Future[Grammar]] = {}
        self._lock = threading.Lock()
        weakref.finalize(self, self._host.close)

    @property
    def counts(self) -> GrammarCounts:
        """Counters of grammars and their processes."""
        return self._host.counts

    @property
    def process_ids(self) -> list[int]:
        """The processes that this object has started."""
        return self._host.process_ids

    def prepare(self, wanted: StructuredOutputs, tenant: str = _DEFAULT_TENANT) -> Grammar:
        """Try a tenant's grammar out, unless that was done. It stays ready for `new_guide` while the result is kept.

        This may take seconds. Raises RequestError for a grammar that cannot be enforced, TooCostlyError for one that
        exceeds a limit.
        """
        key = tenant, hashlib.blake2b(wanted.model_dump_json().encode(), digest_size=16).digest()
        with self._lock:
            known = self._known_of(key)
            pending = self._pending.get(key)
            if known is None and pending is None:
                self._pending[key] = mine = Future[Grammar]()
        if isinstance(known, _Refusal):
            raise copy(known.error)
        if known is not None:
            return known
        # Concurrent requests of a tenant with the same grammar wait for one trial.
        return pending.result() if pending is not None else self._try_out(key, wanted, mine)

    def _known_of(self, key: _Key) -> Grammar | _Refusal | None:
        """Return what is known of a grammar. A refusal that has lasted long enough is forgotten."""
        known = self._known.get(key) or self._used.get(key)
        if known is None or known.refused_s is None:
            return known
        num_ended = self._num_ended.get(key, 0)
        if time.monotonic() < known.refused_s + min(FIRST_REFUSAL_S * 2**num_ended, LONGEST_REFUSAL_S):
            return known
        self._num_ended[key] = num_ended + 1
        self._known.pop(key, None)
        self._used.pop(key, None)
        return None

    def new_guide(self, grammar: Grammar, reasoning: ReasoningState | None = None) -> Guide:
        """Return a guide at the start of a text, or of the reasoning before it.

        Raises TooCostlyError for a grammar that was refused after its trial.
        """
        if grammar.refusal is not None:
            raise copy(grammar.refusal)
        return self._host.new_guide(grammar, reasoning)

    def write(self, masks: TokenMasks | None) -> None:
        """Request a step's masks; they are written while the step runs."""
        if isinstance(masks, GuidedMasks):
            self._host.begin(masks)

    def close(self) -> None:
        """End the processes."""
        self._host.close()

    def _try_out(self, key: _Key, wanted: StructuredOutputs, mine: Future[Grammar]) -> Grammar:
        found: Grammar | _Refusal | None = None
        try:
            found = self._grammar_of(wanted, tenant=key[0])
            mine.set_result(found)
            return found
        except BaseException as error:
            if isinstance(error, RequestError):
                found = _Refusal(copy(error), time.monotonic())
                self.counts.grammar_refusals += 1
                self.counts.grammar_costly_refusals += isinstance(error, TooCostlyError)
            mine.set_exception(error)
            raise
        finally:
            with self._lock:
                del self._pending[key]
                if isinstance(found, Grammar):
                    self._used[key] = found
                if found is not None and found.size <= MAX_CACHED_BYTES:
                    self._known[key] = found

    def _grammar_of(self, wanted: StructuredOutputs, tenant: str) -> Grammar:
        if not self._eos_token_ids:
            raise RequestError("this model has no token that ends a text", param="structured_outputs")
        if wanted.calls is not None:
            return self._calls(wanted.calls, tenant)
        kind, field_name, text = _text_of(wanted)
        field_name = f"structured_outputs.{field_name}"
        result = self._host.try_out(kind, [text], tenant)
        if result.is_too_costly or result.problem:
            raise _refusal(f"{field_name}:", field_name, kind, result)
        return Grammar(kind, text, field_name, result.is_costly)

    def _calls(self, calls: WantedCalls, tenant: str) -> Grammar:
        if calls.answer is not None:
            self.prepare(StructuredOutputs(json_schema=calls.answer), tenant)
        special = self._host.special_tokens()

        def token_of(mark: str) -> int | None:
            token_id = self._tokenizer.id_of(mark)
            return token_id if token_id is not None and token_id in special else None

        grammar = Grammar("calls", CallGrammar(calls, token_of).lark(), "tools", is_costly=False)
        if grammar.size > MAX_CALLS_MIB << 20:
            problem = f"the grammar of the calls has {grammar.size} bytes; the limit is {MAX_CALLS_MIB} MiB"
            raise _refusal("tools: they", "tools", "calls", TrialResult(problem, is_too_costly=True))
        result = self._host.try_out("calls", [grammar.text], tenant)
        name = "they"
        if result.problem:
            # Each function is tried alone to name the first faulty one. The schema of an answer passed its own trial.
            alone = [calls.model_copy(update={"functions": (one,), "answer": None}) for one in calls.functions]
            of_parts = self._host.try_out("calls", [CallGrammar(one, token_of).lark() for one in alone], tenant)
            if of_parts.problem:
                result, name = of_parts, f"the parameters of {calls.functions[of_parts.part].name!r}"
        if result.is_too_costly or result.problem:
            raise _refusal(f"tools: {name}", "tools", "calls", result)
        grammar.is_costly = result.is_costly
        return grammar


def _refusal(what: str, param: str, kind: Kind, result: TrialResult) -> RequestError:
    reason = reason_of(kind, result.problem)
    if result.is_killed:
        why = f"its processes were killed from outside, or did not answer within {TASK_WALL_S:g} s"
        return TooCostlyError(f"{what} cannot be enforced now: {why}", param=param)
    if not result.is_too_costly:
        return RequestError(f"{what} cannot be enforced: {reason}", param=param)
    limit = f"to compile it takes more than {TRIAL_CPU_S:g} s of processor time or {TRIAL_MEMORY_MIB} MiB"
    return TooCostlyError(f"{what} cannot be enforced: it is too costly: {reason or limit}", param=param)


def _text_of(wanted: StructuredOutputs) -> tuple[Kind, str, str]:
    """Return a grammar's notation, the request field that it comes from, and its text."""
    if wanted.regex is not None:
        return "regex", "regex", wanted.regex
    if wanted.choice is not None:
        # One terminal for all texts: common prefixes are then matched once, not once for each text.
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in wanted.choice)
        return "lark", "choice", f"start: CHOICE\nCHOICE: {texts}"
    if wanted.grammar is not None:
        return "lark", "grammar", wanted.grammar
    if wanted.json_schema is not None:
        return "json", "json_schema", wanted.json_schema
    return "json", "json_object", json.dumps({"type": "object"})
