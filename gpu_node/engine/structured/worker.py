"""A grammar worker, a process: it compiles grammars, and decides by its matchers which tokens a choice may take next.

It does one task after the other, until a limit kills it, and knows no steps: `host.py` decides when a mask is wanted.
The worker writes the number of its current task into a shared page, which identifies the faulty task after a kill.
Masks stand in that page too. Replies leave in batches, at the end of a message or after a millisecond of work.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import resource
import signal
import socket
import time
from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, LLParserLimits
from llguidance.gbnf_to_lark import any_to_lark

from penstock.gpu_node.engine.structured import protocol
from penstock.gpu_node.engine.structured.protocol import (
    EMPTY,
    MISFIT,
    PAST_LIMITS,
    UNKNOWN,
    WRITTEN,
    FrameReader,
    frame,
)
from penstock.gpu_node.engine.structured.schema.rewriting import OPTIONS_KEYWORD, rewritten
from penstock.gpu_node.engine.structured.shared_page import NO_SLOT, SharedPage

if TYPE_CHECKING:
    from llguidance import LLTokenizer
    from llguidance._lib import JsonCompileOptions


class Matching:
    """The matchers of one worker's choices, by number: they say which tokens a choice may continue with."""

    def __init__(self, tokenizer: LLTokenizer, special: Sequence[int], compiler: Compiler, page: SharedPage) -> None:
        """`special`: the ids of the special tokens. `page` gets the masks."""
        self._tokenizer = tokenizer
        self._special_bits = _special_bits(special)
        self._compiler = compiler
        self._matchers: dict[int, LLMatcher] = {}
        self._page = page
        self._slots = page.addresses()
        self._mask_bytes = page.mask_bytes
        self._words = ctypes.create_string_buffer(self._mask_bytes)
        self._nothing = bytes(self._mask_bytes)

    def mask(self, guide_id: int, grammar_id: int, is_new: bool, token_ids: bytes, slot: int) -> tuple[int, bytes]:
        """Advance a choice by some tokens (int32); return a mask status, and the reason if there is no mask.

        The mask is in the slot; without one (NO_SLOT), it is returned. `is_new`: the choice has no matcher here yet, so
        it starts at the beginning of its text.
        """
        matcher = self._compiler.copy(grammar_id) if is_new else self._matchers.get(guide_id)
        if matcher is None:
            return UNKNOWN, b""
        self._matchers[guide_id] = matcher
        if token_ids and not matcher.consume_tokens(array("i", token_ids).tolist()):
            return (PAST_LIMITS if is_past_limits(matcher) else MISFIT), _reason(matcher)
        has_slot = slot != NO_SLOT
        matcher.unsafe_compute_mask_ptr(
            self._slots[slot] if has_slot else ctypes.addressof(self._words), self._mask_bytes
        )
        if matcher.is_error():
            return PAST_LIMITS, _reason(matcher)
        mask = self._page.read(slot) if has_slot else self._words.raw
        if mask == self._nothing:
            return EMPTY, b""
        # To look for a single bit takes as long as many a mask, so the few bytes with special tokens come first.
        only = None
        for start, end, bits in self._special_bits:
            if int.from_bytes(mask[start:end], "little") & bits:
                only = _only_bit(mask)
                break
        if only is not None and self._is_mistaken(matcher, only):
            mask = self._spelled(matcher)
            if has_slot:
                self._page.write(slot, mask)
        return WRITTEN, b"" if has_slot else mask

    def close(self, guide_id: int) -> None:
        """Drop a choice's matcher."""
        self._matchers.pop(guide_id, None)

    def _is_mistaken(self, matcher: LLMatcher, token_id: int) -> bool:
        """Whether the only token that the mask allows does not fit."""
        return (
            self._tokenizer.is_special_token(token_id)
            # Where a text may end, allowing the end token is right, though validation does not accept it.
            and not matcher.is_accepting()
            and not matcher.validate_tokens([token_id])
        )

    def _spelled(self, matcher: LLMatcher) -> bytes:
        """Return a mask of the ordinary token that continues the forced text.

        llguidance tokenizes forced text like a prompt, so the name of a special token becomes that token. A special
        token adds no text, and may end the text early.
        """
        forced = matcher.compute_ff_bytes().decode(errors="ignore")
        mask = bytearray(self._mask_bytes)
        for token_id in self._tokenizer.greedy_tokenize(forced)[:1]:
            mask[token_id // 8] |= 1 << token_id % 8
        return bytes(mask)


_MAX_GAP_BYTES = 64


def _special_bits(token_ids: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return where the bits of these tokens stand in a mask: first byte, byte after the last one, and the bits there.

    Close bytes are one range. Most vocabularies have their special tokens in one or two ranges, beside ordinary ones.
    """
    ranges: list[tuple[int, int, int]] = []
    for token_id in sorted(token_ids):
        at = token_id // 8
        start, end, bits = ranges.pop() if ranges and at - ranges[-1][1] <= _MAX_GAP_BYTES else (at, at, 0)
        ranges.append((start, max(end, at + 1), bits | 1 << token_id - 8 * start))
    return ranges


def _reason(matcher: LLMatcher) -> bytes:
    return (matcher.get_error() or "unknown").splitlines()[0].encode()[:500]


def _only_bit(mask: bytes) -> int | None:
    """Return the position of the only set bit; None if there is not exactly one."""
    whole = int.from_bytes(mask, "little")
    return None if not whole or whole & (whole - 1) else whole.bit_length() - 1


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
            step_lexer_fuel=protocol.STEP_LEXER_FUEL,
            initial_lexer_fuel=protocol.INITIAL_LEXER_FUEL,
            max_lexer_states=protocol.MAX_LEXER_STATES,
            step_max_items=protocol.STEP_MAX_ITEMS,
            max_items_in_row=protocol.MAX_ITEMS_IN_ROW,
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


class TrialRun:
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
            began_s = time.thread_time()
            mask = matcher.compute_bitmask()
            self._worst_s = max(self._worst_s, time.thread_time() - began_s)
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
        return LLMatcher.grammar_from_lark(_lark_of(text) if _GBNF_RULE.search(text) else text)
    if kind == "calls":
        return LLMatcher.grammar_from_lark("\n".join(map(_with_options, text.split("\n"))))
    return LLMatcher.grammar_from_json_schema(rewritten(text), overrides=COMPACT)


_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)


def _lark_of(text: str) -> str:
    """Return a grammar of llama.cpp's notation (GBNF, `root ::= …`) in Lark's. Raises ValueError for a wrong one."""
    try:
        # A text that has a rule `start` or an option is Lark's already.
        return any_to_lark(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except Exception as error:  # The library has one class for errors of notation and none for the rest.
        raise ValueError(f"it is no grammar of llama.cpp's notation: {error}") from None


def _with_options(rule: str) -> str:
    """Return a rule of a call grammar. Rewrite its JSON schema, if it has one."""
    found = _SCHEMA_RULE.fullmatch(rule)
    if found is None:
        return rule
    head, schema = found.groups()
    return head + json.dumps(json.loads(rewritten(schema)) | {OPTIONS_KEYWORD: COMPACT})


_MIB = 1 << 20
_REPLY_AFTER_CPU_S, _REPLY_WITHIN_S = 0.001, 0.005
"""Replies leave after so much processor time of tasks, or so much time. On a busy machine a task may take long."""
_MEASURED_CPU_S = 0.004
"""Memory is measured after this much processor time. In less, tasks cannot have taken much."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_VIRTUAL, _RESIDENT = 0, 1
"""Fields of /proc/self/statm."""


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """The limits of a worker: processor time per task in seconds, added address space in MiB, and niceness."""

    task_cpu_s: float
    memory_mib: int
    niceness: int
    mask_bytes: int


class WorkerLoop:
    """The loop of a worker process. Each of the node's messages is a list of tasks: number, name, arguments."""

    def __init__(
        self, tokenizer: LLTokenizer, special: Sequence[int], node: socket.socket, page: SharedPage, task_cpu_s: float
    ) -> None:
        self._node = node
        self._page = page
        self._task_cpu_s = task_cpu_s
        self._compiler = Compiler(tokenizer)
        self._matching = Matching(tokenizer, special, self._compiler, page)
        self._replies: list[Any] = []
        self._replied_s = self._unreplied_s = 0.0
        """When replies last left, on the monotonic clock, and the processor time since then."""
        self._unmeasured_s = 0.0
        """Processor time since memory was last measured."""

    def run(self) -> None:
        """Serve until the node closes the socket."""
        reader = FrameReader()
        while data := self._node.recv(1 << 18):
            for tasks in reader.feed(data):
                self._replied_s = time.monotonic()
                for number, name, *arguments in tasks:
                    self._page.note_current(number)
                    self._do(number, name, arguments)
                signal.setitimer(signal.ITIMER_PROF, 0)
                self._page.note_current(0)
                self._reply()

    def _do(self, number: int, name: str, arguments: list[Any]) -> None:
        # The timer counts this process's processor time. Its signal ends the process. While it runs, the clock of the
        # process stands still between the ticks of the kernel, but the clock of the thread does not.
        began_s = time.thread_time()
        signal.setitimer(signal.ITIMER_PROF, self._task_cpu_s)
        answer = self._answer(name, arguments)
        cpu_s = time.thread_time() - began_s
        self._unmeasured_s += cpu_s
        memory = 0
        if self._unmeasured_s > _MEASURED_CPU_S:
            memory, self._unmeasured_s = _statm(_RESIDENT), 0.0
        self._replies.append([number, answer, cpu_s, memory])
        self._unreplied_s += cpu_s
        if self._unreplied_s > _REPLY_AFTER_CPU_S or time.monotonic() - self._replied_s > _REPLY_WITHIN_S:
            self._reply()

    def _answer(self, name: str, arguments: list[Any]) -> Any:
        if name == "mask":
            return self._matching.mask(*arguments)
        if name == "compile":
            return self._compiler.compile(*arguments)
        if name == "close":
            return self._matching.close(*arguments)
        if name == "forget":
            return self._compiler.forget(*arguments)
        return TrialRun(self._compiler).run(*arguments)

    def _reply(self) -> None:
        self._replied_s, self._unreplied_s = time.monotonic(), 0.0
        if self._replies:
            self._node.sendall(frame(self._replies))
            self._replies.clear()


def serve(tokenizer: LLTokenizer, special: Sequence[int], node_fd: int, page_fd: int, limits: WorkerLimits) -> None:
    """Run as a worker, in a process that was just forked. `special`: the ids of the special tokens."""
    os.setpriority(os.PRIO_PROCESS, 0, min(19, os.getpriority(os.PRIO_PROCESS, 0) + limits.niceness))
    page = SharedPage(page_fd, limits.mask_bytes)
    os.close(page_fd)
    limit = _statm(_VIRTUAL) + limits.memory_mib * _MIB
    with suppress(ValueError):  # The process was started with a lower limit.
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with socket.socket(fileno=node_fd) as node:
        WorkerLoop(tokenizer, special, node, page, limits.task_cpu_s).run()


def _statm(field: int) -> int:
    """Return the bytes of memory in a field of /proc/self/statm."""
    with open("/proc/self/statm", "rb") as statm:
        return int(statm.read().split()[field]) * _PAGE_BYTES
