"""State slots that record which tokens each has seen, and a guide whose masks may be late."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items

import numpy as np

from penstock.gpu_node.engine.scheduler.scheduler import Scheduler
from penstock.gpu_node.engine.sequence import Sequence
from penstock.gpu_node.engine.steps import Step
from penstock.gpu_node.model.protocol import NO_STATE, StepPlan, TokenMasks

NOTHING_SEEN = ()
LOST = ("lost",)


class LabelledSlots:
    """The slots of a runner. The state in a slot is the list of all tokens that it has seen, in order."""

    def __init__(self) -> None:
        self._states: dict[int, tuple[object, ...]] = {}
        self._before: dict[int, tuple[object, ...]] = {}
        """Before the newest step."""

    def run(self, scheduler: Scheduler, step: Step, plan: StepPlan) -> None:
        """Run a step as a runner does. Assert that each sequence continues the state of exactly its own tokens."""
        states = plan.states
        assert states is not None
        self._check_targets(plan)
        self._before = self._states.copy()
        before = [self._read(int(slot)) for slot in states.reads]
        saves = dict(map(tuple, states.saves.tolist()))
        for i, seq in enumerate(step.seqs):
            tokens = [seq.root_hash, *scheduler.tokens_of(seq).tolist()]
            start, end, first = int(step.starts[i]), int(step.ends[i]), int(plan.query_starts[i])
            expected = tuple(tokens[: start + 1]) if start else NOTHING_SEEN
            assert before[i] == expected, f"{seq.request_id}: token {start} follows the state of {before[i]}"
            state = before[i] or (seq.root_hash,)
            for at in range(start, end):
                state += (tokens[1 + at],)
                if (slot := saves.get(first + at - start)) is not None:
                    self._states[slot] = state
            self._states[int(states.writes[i])] = state

    def undo(self) -> None:
        """Be as before the newest step: it did not begin."""
        self._states = self._before.copy()

    def fail(self, plan: StepPlan) -> None:
        """Run a step that fails in the middle: what it writes to is lost."""
        self.spoil(set(self.targets(plan)))

    def spoil(self, slots: set[int]) -> None:
        """Lose the states in some slots."""
        self._states |= dict.fromkeys(slots, LOST)

    @staticmethod
    def targets(plan: StepPlan, indices: Items[int] | None = None) -> list[int]:
        """Return the slots that a step writes for some of its sequences."""
        states = plan.states
        assert states is not None
        owners = np.searchsorted(plan.query_starts, states.saves[:, 0], side="right") - 1
        chosen = range(len(states.writes)) if indices is None else indices
        saved = [slot for owner, slot in zip(owners, states.saves[:, 1].tolist(), strict=True) if owner in chosen]
        return [*states.writes[list(chosen)].tolist(), *saved]

    def _read(self, slot: int) -> tuple[object, ...]:
        return NOTHING_SEEN if slot == NO_STATE else self._states[slot]

    def _check_targets(self, plan: StepPlan) -> None:
        """Assert what `StepStates` promises to a runner."""
        states = plan.states
        assert states is not None
        targets = self.targets(plan)
        assert len(set(targets)) == len(targets) and min(targets) >= 0
        for i, write in enumerate(states.writes.tolist()):
            assert write not in np.delete(states.reads, i)
        owners = np.searchsorted(plan.query_starts, states.saves[:, 0], side="right") - 1
        for owner, (_, slot) in zip(owners, states.saves.tolist(), strict=True):
            assert slot not in np.delete(states.reads, owner)
        assert (np.diff(states.saves[:, 0]) > 0).all()
        last_tokens = plan.query_starts[1:] - 1
        assert not set(states.saves[:, 0].tolist()) & set(last_tokens.tolist())


class UncertainGuide:
    """A guide that allows every token. Its mask arrives when a test says so."""

    is_idle = False

    def __init__(self) -> None:
        self.is_waiting = False
        self._num_seen = 0

    def new_tokens_of(self, output: np.ndarray[tuple[int], np.dtype[np.int32]]) -> list[int]:
        """Return the tokens that earlier calls did not return."""
        tokens: list[int] = output[self._num_seen :].tolist()
        self._num_seen = len(output)
        return tokens

    def take(self, token_ids: Items[int]) -> None:
        """Take only tokens that are known."""
        assert all(token >= 0 for token in token_ids)

    def masks_of(self, guided: Items[UncertainGuide | None], forced: Mapping[int, int]) -> TokenMasks:
        """Return masks of two words."""
        return TokenMasks(np.array([guide is not None for guide in guided]), 64)


class Beams:
    """A beam search that continues at random."""

    def __init__(self, seqs: list[Sequence]) -> None:
        self.remaining = list(seqs)
        for seq in seqs:
            seq.beams = self.remaining
        self.all_seqs = list(seqs)
        self.active = seqs[:1]

    def next(self, picks: Items[int]) -> list[tuple[Sequence, Sequence, int]]:
        """Return the beams of the next step if all have computed their newest token, as `continue_beams` takes them."""
        if not all(seq.is_parked for seq in self.active):
            return []
        sources = [self.active[pick % len(self.active)] for pick in picks[: len(self.all_seqs)]]
        kept = dict.fromkeys(sources)
        unused = iter([seq for seq in self.all_seqs if seq not in kept])
        beams = []
        for i, source in enumerate(sources):
            seq = source if source in kept else next(unused)
            kept.pop(source, None)
            beams.append((seq, source, 1000 + i))
        self.active = [seq for seq, _, _ in beams]
        return beams
