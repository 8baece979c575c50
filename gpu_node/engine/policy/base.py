"""The interface of scheduling policies, and first come, first served."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from penstock.gpu_node.engine.policy.shares import Device
from penstock.gpu_node.engine.sequence import Sequence

NumTokens = Callable[[Sequence], int]
"""Number of tokens of a running sequence, prompt included."""


class SchedulingPolicy(Protocol):
    """The order in which a scheduler starts and preempts sequences."""

    @property
    def has_shares(self) -> bool:
        """Whether tenants have shares of the device and of a step's budget."""

    def added(self, seq: Sequence) -> None:
        """Note that a sequence is about to be queued."""

    def ended(self, seq: Sequence, num_output_tokens: int) -> None:
        """Note that a sequence ended by itself, with its number of output tokens."""

    def offer(self, waiting: Iterable[Sequence], start: Callable[[Sequence], bool]) -> None:
        """Call `start` for waiting sequences, in the policy's order. It returns False where a sequence does not fit.

        A policy may offer more sequences after one that does not fit. In `waiting` swapped sequences come first, then
        those that lost their blocks, then new ones in order of arrival.
        """

    def preemption_request(
        self, waiting: Iterable[Sequence], running: list[Sequence], num_tokens: NumTokens
    ) -> tuple[Sequence, list[Sequence]] | None:
        """Return a waiting sequence that may preempt others, with the sequences to preempt, in order; or None."""

    def share_request(
        self, waiting: Iterable[Sequence], running: list[Sequence], device: Device
    ) -> tuple[Sequence, list[Sequence]] | None:
        """Return a sequence of a tenant below its share, with those to preempt for it, in order; or None."""

    def victim(self, running: list[Sequence], num_tokens: NumTokens) -> Sequence:
        """Return the sequence to preempt when a running one finds no free block; it may be the same one."""


class FirstComeFirstServed:
    """First come, first served: no sequence overtakes another, and the newest running one is preempted."""

    has_shares = False

    def added(self, seq: Sequence) -> None:
        """Do nothing: the queue keeps the order of arrival."""

    def ended(self, seq: Sequence, num_output_tokens: int) -> None:
        """Do nothing: output lengths do not matter here."""

    def offer(self, waiting: Iterable[Sequence], start: Callable[[Sequence], bool]) -> None:
        """Start sequences in queue order, up to the first one that does not fit."""
        for seq in waiting:
            if not start(seq):
                return

    def preemption_request(self, waiting: Iterable[Sequence], running: list[Sequence], num_tokens: NumTokens) -> None:
        """Return None: waiting sequences never preempt running ones."""

    def share_request(self, waiting: Iterable[Sequence], running: list[Sequence], device: Device) -> None:
        """Return None: tenants have no shares."""

    def victim(self, running: list[Sequence], num_tokens: NumTokens) -> Sequence:
        """Return the newest running sequence."""
        return running[-1]
