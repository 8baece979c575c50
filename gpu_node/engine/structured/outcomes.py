"""What it means that a task failed or that its worker died, and how often that happened."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from penstock.contract.errors import PenstockError, RequestError, TooCostlyError
from penstock.gpu_node.engine.structured import limits
from penstock.gpu_node.engine.structured.grammar import Grammar
from penstock.gpu_node.engine.structured.mask_status import EMPTY, MISFIT, PAST_LIMITS

MAX_KILLS_FROM_OUTSIDE = 3
"""A system that is short of memory kills without saying why. A grammar in whose tasks it did so often is blamed."""


@dataclass(slots=True)
class GrammarCounts:
    """Counters of one host; they only grow."""

    grammar_trials: int = 0
    grammar_refusals: int = 0
    """New grammars that were refused,"""
    grammar_costly_refusals: int = 0
    """and those of them that a limit of time, memory or work refused."""
    grammar_kills: int = 0
    """Workers that a limit killed, trials not counted."""
    grammar_restarts: int = 0
    """Workers that were started in the place of one that ended."""
    late_masks: int = 0
    """Rows that sat out a step because their mask was not ready."""
    failed_guides: int = 0
    """Choices that ended because of their grammar."""


def refusal_of(grammar: Grammar, reason: str) -> TooCostlyError:
    """Why a choice cannot go on with a grammar that passed a limit."""
    return TooCostlyError(
        f"{grammar.field_name}: cannot be kept to: it is too costly: {reason}", param=grammar.field_name
    )


def failure_of(grammar: Grammar, status: int, reason: bytes) -> PenstockError:
    """Why a choice has no mask, as its worker says it."""
    said = reason.decode(errors="replace")
    if status == PAST_LIMITS:
        return refusal_of(grammar, f"a token got past the limits of work ({said})")
    if status == MISFIT:
        return RequestError("the logged tokens are not of the form that is asked for", param="resume")
    if status == EMPTY:
        field_name = grammar.field_name
        return RequestError(f"{field_name}: no token of this model goes on with a text of that form", param=field_name)
    return refusal_of(grammar, "it could not be compiled again")


def blames_task(exit_status: int | None, grammar: Grammar | None) -> bool:
    """Whether a worker died of the task that it was at. It did not where it was killed from outside."""
    if exit_status is None:
        return False
    if exit_status != -signal.SIGKILL:
        return True
    if grammar is not None:
        grammar.num_kills += 1
    return grammar is not None and grammar.num_kills >= MAX_KILLS_FROM_OUTSIDE


def why_killed(exit_status: int | None, cpu_s: float) -> str:
    """The limit that a worker died of."""
    if exit_status == -signal.SIGPROF:
        return f"a task took more than {cpu_s:g} s of processor time"
    return f"a task took more than {limits.WORKER_MEMORY_MIB} MiB of memory, or broke the compiler"
