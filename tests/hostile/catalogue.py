"""The definition of an attack, and the registry of all attacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hostile.attacker import Run


@dataclass(frozen=True)
class Attack:
    """One row of the report."""

    name: str
    what: str
    run: Run
    refused: bool = False
    """The attacker gets a refusal or a failed choice for everything, never an answer."""
    seconds: float = 12.0
    """For so long new requests are sent."""
    grace_s: float = 45.0
    """The last answers may come so long after the last request; then the attacker is ended."""
    load: str = ""
    """Why the neighbor shares the node with this much honest work, and is held to less: a control, or a full batch."""
    stack: Mapping[str, Any] = field(default_factory=dict)


ATTACKS: dict[str, Attack] = {}
MAX_TOKENS = 300
"""Of each answer where tokens are counted."""
TABLE = (
    *("grammar", "grammars", "choice", "prompt_logprobs_n"),
    *("tool_histories", "stored_results", "interactive_flood", "short_then_long"),
)
"""The rows of the issue that this catalogue began with."""


def attack(what: str, **options: Any) -> Callable[[Run], Run]:
    """Register a function in the catalogue under its own name."""

    def enter(run: Run) -> Run:
        ATTACKS[run.__name__] = Attack(run.__name__, what, run, **options)
        return run

    return enter
