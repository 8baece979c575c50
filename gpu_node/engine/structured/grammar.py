"""A tenant's grammar as the node knows it: its text, the result of its trial, and what it has cost since."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field
from typing import Literal

from penstock.contract.errors import PenstockError

Kind = Literal["lark", "regex", "json", "calls"]
"""`calls` is Lark's notation with JSON schemas in rules of their own, as `CallGrammar` writes it."""

_numbers = itertools.count(1)


@dataclass(eq=False, slots=True, weakref_slot=True)
class Grammar:
    """A tenant's grammar that passed its trial. Guides keep it alive, even after the cache has dropped it.

    Two tenants with the same text have two of these, with numbers, accounts and refusals of their own.
    """

    kind: Kind
    text: str
    field_name: str
    """The request's field, for error messages."""
    is_costly: bool
    """Whether the worker for costly grammars serves it."""
    number: int = field(default_factory=lambda: next(_numbers))
    num_guides: int = 0
    """Number of choices that use it now."""
    memory: int = 0
    """Bytes that its worker grew by during its tasks."""
    num_slow_masks: int = 0
    """Masks that took longer than a cheap grammar's may."""
    num_masks: int = 0
    """Masks computed since `memory` was 0."""
    num_kills: int = 0
    """Workers that were killed from outside during its tasks."""
    refusal: PenstockError | None = None
    """Why no choice may continue with it."""
    refused_s: float | None = None
    """When it was refused, on the monotonic clock."""
    account_s: float = field(default_factory=time.monotonic)
    """When its account began: memory, masks and kills. After a while another one begins."""

    def refuse(self, error: PenstockError) -> None:
        """Let no choice continue with it. The first reason stays."""
        if self.refusal is None:
            self.refusal, self.refused_s = error, time.monotonic()

    def begin_account(self, now_s: float) -> None:
        """Begin another account."""
        self.account_s = now_s
        self.memory = self.num_masks = self.num_slow_masks = self.num_kills = 0

    @property
    def size(self) -> int:
        """Bytes that the cache counts for it."""
        return len(self.text.encode()) + 512


@dataclass(frozen=True, slots=True)
class TrialResult:
    """The result of a trial: the error, if any, and the index of the text at fault."""

    problem: str = ""
    part: int = 0
    is_costly: bool = False
    is_too_costly: bool = False
    """Whether a limit is the reason. Without a `problem`, the limit killed the trial's worker."""
    is_killed: bool = False
    """Whether its workers were killed from outside too often. Another trial may succeed later."""
