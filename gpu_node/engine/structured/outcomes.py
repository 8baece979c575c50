"""What failed tasks and dead workers mean for their grammars and choices, and the counters of both."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from penstock.contract.errors import PenstockError, RequestError, TooCostlyError
from penstock.gpu_node.engine.structured import limits
from penstock.gpu_node.engine.structured.grammar import Grammar
from penstock.gpu_node.engine.structured.mask_status import EMPTY, MISFIT, PAST_LIMITS
from penstock.gpu_node.engine.structured.reasons import reason_of

MAX_KILLS_FROM_OUTSIDE = 3
"""The system may kill any process if memory runs out. A grammar is refused after this many such kills in its tasks."""


@dataclass(slots=True)
class GrammarCounts:
    """Counters of one host; they only grow."""

    grammar_trials: int = 0
    grammar_refusals: int = 0
    """New grammars that were refused."""
    grammar_costly_refusals: int = 0
    """Refused grammars that exceeded a limit of time, memory or work."""
    grammar_kills: int = 0
    """Workers that a limit killed, without trials."""
    grammar_restarts: int = 0
    """Workers started to replace one that had ended."""
    late_masks: int = 0
    """Rows that sampled nothing in a step because their mask was not ready."""
    failed_guides: int = 0
    """Choices that ended because of their grammar."""
    grammar_host_failures: int = 0
    """Times that the node's side of the grammar processes ended with an error. Structured output fails from then on."""


def refusal_of(grammar: Grammar, reason: str) -> TooCostlyError:
    """Return the error of a choice with a grammar that exceeded a limit."""
    return TooCostlyError(
        f"{grammar.field_name}: cannot be enforced: it is too costly: {reason}", param=grammar.field_name
    )


def failure_of(grammar: Grammar, status: int, reason: bytes) -> PenstockError:
    """Return the error of a choice without a mask, from its worker's answer."""
    detail = reason.decode(errors="replace")
    if status == PAST_LIMITS:
        return refusal_of(grammar, f"a token exceeded the limits of work ({reason_of(grammar.kind, detail)})")
    if status == MISFIT:
        return RequestError("the logged tokens do not match the requested structured output", param="resume")
    if status == EMPTY:
        field_name = grammar.field_name
        return RequestError(f"{field_name}: no token of this model can continue the text", param=field_name)
    return refusal_of(grammar, "it could not be compiled again")


def blames_task(exit_status: int | None, grammar: Grammar | None) -> bool:
    """Whether a dying worker's current task is at fault. It is not if the worker was killed from outside."""
    if exit_status is None:
        return False
    if exit_status != -signal.SIGKILL:
        return True
    if grammar is not None:
        grammar.num_kills += 1
    return grammar is not None and grammar.num_kills >= MAX_KILLS_FROM_OUTSIDE


def is_memory_death(exit_status: int | None) -> bool:
    """Whether a worker ended itself, as one without memory does. Limits of time and kills from outside have signals."""
    return exit_status not in (None, 0, -signal.SIGPROF, -signal.SIGKILL)


def why_killed(exit_status: int | None, cpu_s: float) -> str:
    """Return the limit that killed a worker."""
    if exit_status == -signal.SIGPROF:
        return f"a task took more than {cpu_s:g} s of processor time"
    return f"a task took more than {limits.WORKER_MEMORY_MIB} MiB of memory, or broke the compiler"
