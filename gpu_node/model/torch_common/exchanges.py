"""What ranks exchange within a step: how they fail together, and whether they sample the same tokens."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from penstock.contract.errors import InvariantError
from penstock.gpu_node.model.torch_common.memory_errors import translate_out_of_memory
from penstock.gpu_node.model.torch_common.ranks import ALONE, BrokenExchangeError, Communicator, RankLinks

log = logging.getLogger(__package__)

Result = TypeVar("Result")


class RankFailedError(RuntimeError):
    """A step failed at another rank. The next step may succeed."""


class PlannedExchange(NamedTuple):
    """An exchange of a step, by its kind and the shape of its tensor."""

    kind: Literal["sum", "from_first", "send", "receive"]
    rows: int
    columns: int


class RankOutputs(NamedTuple):
    """What a step has computed: outputs of the head, and hidden states that are wanted themselves.

    At rank 0 also memory for those of other ranks, which come once it is known that no rank failed.
    """

    outputs: Tensor | None
    """[num_logits, part of the vocabulary] in float32; None if this rank has no head."""
    hidden: Tensor | None
    """[num_pooled, hidden] in float32; None if this rank has no head."""
    places: Mapping[int, Tensor] = {}
    """For the outputs of other ranks, by rank."""
    hidden_place: Tensor | None = None
    """For hidden states of the last stage."""


class Exchanges:
    """Makes the exchanges of steps. If a step fails at one rank, it fails at all of them, and none waits in vain.

    A rank whose step fails still takes part in the exchanges that are left, with zeros. Then all ranks vote.
    """

    def __init__(self, links: RankLinks = ALONE, max_numbers: int = 0) -> None:
        """max_numbers: of the largest exchange of a usual step. Their memory is allocated now."""
        self._tensor, self._world = links.tensor, links.world
        self._last = links.world.size - links.tensor.size
        """The first rank of the last stage."""
        self._spare = torch.zeros(max_numbers if links.world.size > 1 else 0)
        self._num_made = 0

    @property
    def size(self) -> int:
        """The number of ranks that compute the same layers."""
        return self._tensor.size

    @property
    def is_alone(self) -> bool:
        """Whether this rank computes the whole model."""
        return self._world.size == 1

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks of this stage in float32; with one rank x itself."""
        if self._tensor.size == 1:
            return x
        wide = x.float().contiguous()
        if not wide.numel():
            return wide
        self._num_made += 1
        return self._tensor.sum(wide)

    def from_first(self, x: Tensor) -> Tensor:
        """Return x of this stage's first rank."""
        if self._tensor.size == 1 or not x.numel():
            return x
        x = x.contiguous()
        self._num_made += 1
        return self._tensor.from_first(x)

    def to_next_stage(self, x: Tensor) -> None:
        """Send x to the rank with the same part of the next stage."""
        x = x.contiguous()
        self._num_made += 1
        self._world.send(x, self._world.rank + self._tensor.size)

    def from_stage_before(self, rows: int, columns: int) -> Tensor:
        """Return what the rank with the same part of the stage before sent."""
        x = torch.empty(rows, columns)
        self._num_made += 1
        self._world.receive(x, self._world.rank - self._tensor.size)
        return x

    @contextmanager
    def needed_to_vote(self) -> Iterator[None]:
        """A context for what a rank must do before it can vote. If it fails, the other ranks would wait for the vote.

        So an error in it becomes a BrokenExchangeError, unless there is one rank.
        """
        try:
            yield
        except BrokenExchangeError:
            raise
        except Exception as error:
            if self.is_alone:
                raise
            raise BrokenExchangeError(f"rank {self._world.rank} cannot vote on a step: {error!r}") from error

    def run(self, planned: Sequence[PlannedExchange], work: Callable[[], Result]) -> Result:
        """Do `work`, which makes the planned exchanges in order, without those of no numbers.

        If it fails at any rank, raises at all of them: MemoryError if all failures are MemoryErrors, else the rank's
        own error or RankFailedError. Raises BrokenExchangeError if another rank is gone.
        """
        if self.is_alone:
            return work()
        planned = [one for one in planned if one.rows * one.columns and self._is_made(one)]
        self._reserve(max((one.rows * one.columns for one in planned), default=0))
        self._num_made = 0
        failure: Exception | None = None
        try:
            with translate_out_of_memory():
                result = work()
        except BrokenExchangeError:
            raise
        except Exception as error:
            failure = error
            if self._world.rank:
                log.warning("a step failed at a rank", extra={"rank": self._world.rank, "reason": repr(error)})
        self._vote(failure, planned[self._num_made :])
        return result

    def place_for_others(self, outcome: RankOutputs, shapes: Sequence[tuple[int, int]]) -> RankOutputs:
        """Add the memory that collecting takes, as the last part of the work of `run`.

        shapes: of a rank's outputs, and of the hidden states.
        """
        if self._world.rank or self.is_alone:
            return outcome
        of_outputs, of_hidden = shapes
        places = {rank: torch.empty(of_outputs) for rank in self._with_head if rank}
        return outcome._replace(places=places, hidden_place=torch.empty(of_hidden) if self._last else None)

    def collected(self, outcome: RankOutputs) -> tuple[Tensor, Tensor] | None:
        """Return at rank 0 the outputs of the whole head and the hidden states; None at other ranks. After `run`."""
        if self._world.rank:
            self._send_to_first(outcome)
            return None
        outputs, hidden, places, hidden_place = outcome
        for rank, place in places.items():
            self._receive(place, rank)
        if hidden_place is not None:
            self._receive(hidden := hidden_place, self._last)
        parts = [part for part in (outputs, *places.values()) if part is not None]
        if hidden is None:
            raise InvariantError("the last stage has no hidden states")
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1), hidden

    @property
    def _with_head(self) -> range:
        """The ranks of the last stage."""
        return range(self._last, self._world.size)

    def _send_to_first(self, outcome: RankOutputs) -> None:
        if outcome.outputs is not None and outcome.outputs.numel():
            self._world.send(outcome.outputs, 0)
        if self._last == self._world.rank and outcome.hidden is not None and outcome.hidden.numel():
            self._world.send(outcome.hidden, 0)

    def _receive(self, place: Tensor, rank: int) -> None:
        if place.numel():
            self._world.receive(place, rank)

    def _is_made(self, one: PlannedExchange) -> bool:
        return one.kind in ("send", "receive") or self._tensor.size > 1

    def _reserve(self, max_numbers: int) -> None:
        """Have the memory for an exchange of zeros. A step with drafts may have more tokens than a usual one."""
        if max_numbers <= len(self._spare):
            return
        with self.needed_to_vote():
            self._spare = torch.zeros(max_numbers)

    def _make(self, planned: Sequence[PlannedExchange]) -> None:
        """Make exchanges with zeros."""
        for kind, rows, columns in planned:
            # Sent tensors are not copied.
            x = self._spare[: rows * columns].view(rows, columns)
            if kind == "sum":
                self._tensor.sum(x.zero_())
            elif kind == "from_first":
                self._tensor.from_first(x.zero_())
            elif kind == "send":
                self._world.send(x, self._world.rank + self._tensor.size)
            else:
                self._world.receive(x, self._world.rank - self._tensor.size)

    def _vote(self, failure: Exception | None, rest: Sequence[PlannedExchange]) -> None:
        """Tell all ranks whether this one failed, and raise if any did. rest: exchanges that it has not made yet."""
        lacks_memory = isinstance(failure, MemoryError)
        is_other = failure is not None and not lacks_memory
        with self.needed_to_vote():
            self._make(rest)
            votes = torch.tensor([lacks_memory, is_other], dtype=torch.float32)
            num_without_memory, num_other = self._world.sum(votes).tolist()
        if num_other:
            own = failure if is_other else None
            raise own or RankFailedError("the step failed at another rank, whose log has the error")
        if num_without_memory:
            raise failure or MemoryError("another rank has no memory for the step")


def done_together(ranks: Communicator, work: Callable[[], Result]) -> Result:
    """Do work at all ranks. Return what it returns at this one, if it succeeds at all of them.

    Raises this rank's own error, or RankFailedError if it failed at another one.
    """
    failure: Exception | None = None
    try:
        done = work()
    except Exception as error:
        failure = error
    (num_failed,) = ranks.sum(torch.tensor([float(failure is not None)])).tolist()
    if failure is not None:
        raise failure
    if num_failed:
        raise RankFailedError("another rank failed; its log has the error")
    return done


class Agreement:
    """Checks that all ranks sample the same tokens, from a digest that they compare every so many steps."""

    def __init__(self, ranks: Communicator, every: int = 64) -> None:
        """ranks: connected for tensors in host memory."""
        self._ranks = ranks
        self._every = every
        self._num_noted = self._digest = 0
        self._is_lost = False

    def note(self, tokens: Tensor) -> None:
        """Note the tokens of a step, in the order of steps.

        Raises BrokenExchangeError if the ranks differ, and from then on always.
        """
        if self._ranks.size == 1:
            return
        self._num_noted += 1
        self._digest = zlib.crc32(tokens.numpy().tobytes(), self._digest)
        if self._num_noted % self._every == 0:
            digests = self._ranks.all_gather(torch.tensor([self._digest]))
            self._is_lost |= bool((digests != digests[0]).any())
        if self._is_lost:
            raise BrokenExchangeError("the ranks sampled different tokens")
