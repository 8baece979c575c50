"""The queues of sequences that do not run: swapped ones hold blocks on the host, waiting ones hold none."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Items
from itertools import chain

from penstock.contract.errors import InvariantError
from penstock.gpu_node.engine.sequence import Sequence


class WaitingQueues:
    """Swapped sequences, then waiting ones. In each queue preempted sequences come first, in order of admission.

    Choices of a request that start together are queued as one entry: the first choice, with the others as its `forks`.
    """

    def __init__(self) -> None:
        self.waiting: deque[Sequence] = deque()
        self.swapped: deque[Sequence] = deque()

    def __iter__(self) -> Iterator[Sequence]:
        return chain(self.swapped, self.waiting)

    def __bool__(self) -> bool:
        return bool(self.swapped or self.waiting)

    @property
    def num_waiting(self) -> int:
        """The number of sequences without blocks."""
        return sum(1 + len(seq.forks) for seq in self.waiting)

    def queue_of(self, seq: Sequence) -> deque[Sequence]:
        """Return the queue that holds a sequence that does not run."""
        return self.swapped if seq.blocks else self.waiting

    def add(self, choices: Items[Sequence]) -> None:
        """Queue new choices that start together."""
        self.waiting.append(_group(choices))

    def put_back(self, *choices: Sequence) -> None:
        """Put choices that ran, or were to start with one that ran, at the head of their queue."""
        seq = _group(choices)
        self.queue_of(seq).appendleft(seq)

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence; its forks stay queued."""
        queue = self.queue_of(seq)
        if seq.forks:
            queue[queue.index(seq)] = _group(seq.forks)
            seq.forks = []
        elif seq.forks_from is not None:
            leave_group(seq)
        else:
            queue.remove(seq)

    def check_integrity(self) -> None:
        """Raise InvariantError unless each sequence is in the right queue, without a row or spare block."""
        for queue, is_swapped in ((self.waiting, False), (self.swapped, True)):
            for seq in queue:
                if any(one.row >= 0 or one.spare is not None for one in (seq, *seq.forks)):
                    raise InvariantError(f"{seq.request_id} is queued and has a row or a spare block")
                if bool(seq.blocks) != is_swapped or any(one.forks_from is not seq for one in seq.forks):
                    raise InvariantError(f"{seq.request_id} is in the wrong queue, or its forks do not know it")


def leave_group(seq: Sequence) -> None:
    """Separate a fork from the sequence that it would start with."""
    if seq.forks_from is not None:
        seq.forks_from.forks.remove(seq)
        seq.forks_from = None


def _group(choices: Items[Sequence]) -> Sequence:
    """Make the first choice the leader and the others its forks."""
    leader, forks = choices[0], list(choices[1:])
    leader.forks, leader.forks_from = forks, None
    for fork in forks:
        fork.forks_from = leader
    return leader
