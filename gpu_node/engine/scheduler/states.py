"""The recurrent states of running sequences: from which slot a step reads, to which it writes, and what it saves.

A state cannot go back. So that it has seen no token twice, a step overwrites a slot only where nothing else needs its
content; otherwise it writes to another slot, and when the step is counted, it is known which of the two holds on.
Invariant: the slot of a sequence has seen exactly the tokens that its row counts as computed.

A sequence has one slot between two steps and one more during a step, so twice as many slots as rows are enough. What is
not necessary is saved only while slots are left: snapshots, and the state before a token that may be computed again.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import numpy as np

from penstock.contract.errors import InvariantError
from penstock.gpu_node.engine.kv_cache.manager import KvCacheManager
from penstock.gpu_node.engine.kv_cache.states import StateCache
from penstock.gpu_node.engine.scheduler.input_batch import InputBatch
from penstock.gpu_node.engine.sequence import Sequence
from penstock.gpu_node.engine.steps import Step
from penstock.gpu_node.model.protocol import NO_STATE, StepStates


@dataclass(slots=True)
class _Held:
    """The slots of a sequence that has a row or is swapped."""

    slot: int = NO_STATE
    """With the state after its computed tokens; NO_STATE before the first."""
    later: int = NO_STATE
    """Of a parked beam: also the state after its newest token, which it computes again unless it is continued."""
    for_forks: dict[int, int] = field(default_factory=dict)
    """The states that its waiting forks start from, by number of tokens."""
    wanted: set[int] = field(default_factory=set)
    """The numbers of tokens after which a snapshot is taken, while its prompt is computed."""
    answer: bytes | None = None
    """The hash of its newest snapshot within its answer. The next one replaces it."""
    used: list[bytes] = field(default_factory=list)
    """The hashes of the snapshots that it began from or made. They go if its logits are not finite."""
    key: bytes | None = None
    """While it is swapped: the key under which its state is kept, unless the slot is needed."""


@dataclass(slots=True)
class _Snapshot:
    """A state that a submitted step computes, and that enters the index once it is computed."""

    seq: Sequence
    num_tokens: int
    slot: int
    block_hash: bytes | None
    """None while a token of its block is unknown."""


@dataclass(slots=True, eq=False)
class _Chunk:
    """The tokens from `start` to `end` of one sequence, in a step that is planned."""

    seq: Sequence
    held: _Held
    start: int
    end: int
    first: int
    """Index of its first token in the step."""
    may_repeat: bool
    """Whether its last token may be computed again: that of a beam, and of a row with a mask, which may be late."""
    read: int
    write: int = NO_STATE
    inner: dict[int, int] = field(default_factory=dict)
    """The slots of the saved states within it, by number of tokens."""


@dataclass(slots=True, eq=False)
class _Submitted:
    """What a submitted step does with slots."""

    plan: StepStates
    before: dict[int, int]
    """By index in the step: the slot with the state before the last token of a sequence that may compute it again."""
    for_forks: list[tuple[Sequence, int, int]]
    """The states that forks start from: their leader, the number of tokens, the slot."""
    snapshots: list[_Snapshot]
    """The step holds a reference on the slot of each."""
    owned: list[int]
    """Further slots that the step holds a reference on, until its tokens are counted."""


class SequenceStates:
    """Gives sequences their slots, and steps their `StepStates`."""

    def __init__(self, memory: KvCacheManager, cache: StateCache, table: InputBatch, block_size: int) -> None:
        self._memory = memory
        self._cache = cache
        self._table = table
        self._block_size = block_size
        self._held: dict[Sequence, _Held] = {}
        self._submitted: deque[_Submitted] = deque()
        """The oldest first."""
        self._lost: list[Sequence] = []

    # --- sequences that start, pause, branch and end

    def num_usable(self, seq: Sequence, num_blocks: int) -> int:
        """Return how many of so many cached blocks a waiting sequence can start with: those up to a snapshot.

        Its forks start from states that it computes, so it starts before the first of them.
        """
        limit = min((fork.num_to_share // self._block_size for fork in seq.forks), default=num_blocks)
        for count in range(min(num_blocks, limit), 0, -1):
            if self._cache.find(seq.block_hashes[count - 1]) is not None:
                return count
        return 0

    def start(self, seq: Sequence, num_stored: int, num_matched: int) -> None:
        """Give a sequence that starts the state after `num_stored` tokens. `num_matched`: tokens with cached blocks."""
        size, held = self._block_size, _Held()
        self._held[seq] = held
        self._cache.note_start(num_stored, num_matched)
        if num_stored:
            known = seq.block_hashes[num_stored // size - 1]
            held.slot = self._cache.hold(known)
            held.used.append(known)
            held.answer = known if num_stored > seq.num_prompt_tokens else None
        if self._memory.caches_prefixes:
            # Prompts differ behind the blocks that matched: the next one with the same beginning starts there.
            last_full = ((count - 1) // size * size for count in (seq.num_prompt_tokens, len(seq.token_ids)))
            held.wanted = {at for at in (*last_full, num_matched) if at > num_stored}
        for fork in seq.forks:
            self._held[fork] = _Held()
            if fork.num_to_share == num_stored > 0 and not held.for_forks:
                held.for_forks[num_stored] = self._cache.share(held.slot)

    def swap_out(self, seq: Sequence, num_stored: int) -> None:
        """Keep the state of a sequence that is swapped as long as no other one needs the slot."""
        held, size = self._held[seq], self._block_size
        full = seq.block_hashes[num_stored // size - 1 : num_stored // size]
        block_hash = full[0] if full and num_stored % size == 0 else None
        held.key = self._cache.leave(held.slot, block_hash, seq.tenant, seq.weight)
        held.slot = NO_STATE

    def is_lost(self, seq: Sequence) -> bool:
        """Return whether the slot of a swapped sequence was needed, so that it must be computed again."""
        held = self._held.get(seq)
        return held is not None and held.key is not None and self._cache.find(held.key) is None

    def resume(self, seq: Sequence) -> None:
        """Give a swapped sequence its slot back."""
        held = self._held[seq]
        if held.key is None:
            raise InvariantError(f"{seq.request_id} resumes, but it is not swapped")
        held.slot = self._cache.hold(held.key)
        self._cache.forget(held.key)
        held.key = None

    def release(self, seq: Sequence) -> None:
        """Free the slots of a sequence, if it has any."""
        held = self._held.pop(seq, None)
        if held is None:
            return
        for slot in (held.slot, held.later, *held.for_forks.values()):
            self._cache.free(slot)
        if held.key is not None:
            self._cache.forget(held.key)

    def share(self, leader: Sequence, fork: Sequence) -> None:
        """Let a fork that starts read the state that its leader has saved for it."""
        of_leader, held = self._held[leader], self._held[fork]
        held.slot = self._cache.share(of_leader.for_forks[fork.num_to_share] if fork.num_to_share else NO_STATE)
        held.used = of_leader.used.copy()

    def forget_forks(self, leader: Sequence) -> None:
        """Free the states that were saved for forks: none waits any more."""
        held = self._held[leader]
        for slot in held.for_forks.values():
            self._cache.free(slot)
        held.for_forks = {}

    def branch(self, source: Sequence, target: Sequence) -> None:
        """Let a parked beam continue from another one: it reads the same state."""
        of_source, held = self._held[source], self._held[target]
        later = self._cache.share(of_source.later)
        for slot in (held.slot, held.later):
            self._cache.free(slot)
        held.slot, held.later, held.used = NO_STATE, later, of_source.used.copy()

    def continue_beam(self, seq: Sequence) -> None:
        """Count the newest token of a parked beam as computed."""
        held = self._held[seq]
        self._cache.free(held.slot)
        held.slot, held.later = held.later, NO_STATE

    # --- steps

    def plan(self, step: Step) -> StepStates:
        """Return where a step reads and writes states, and take slots for that."""
        chunks = self._chunks(step)
        none = np.empty((0, 2), dtype=np.int32)
        planned = _Submitted(StepStates(none, none, none), {}, [], [], [])
        # What is necessary comes first.
        for chunk in chunks:
            self._place(chunk, planned)
        for chunk in chunks:
            self._save_for_forks(chunk, planned)
        for i, chunk in enumerate(chunks):
            if chunk.may_repeat:
                self._save_before(i, chunk, planned)
            self._save_snapshots(chunk, planned)
        saves = [(one.first + at - 1 - one.start, slot) for one in chunks for at, slot in sorted(one.inner.items())]
        planned.plan = StepStates(
            reads=np.array([chunk.read for chunk in chunks], dtype=np.int32),
            writes=np.array([chunk.write for chunk in chunks], dtype=np.int32),
            saves=np.array(saves, dtype=np.int32) if saves else none,
        )
        self._submitted.append(planned)
        return planned.plan

    def count(self, step: Step) -> None:
        """Note that the rows of a step count its tokens as computed, maybe while it still runs."""
        submitted = next(one for one in self._submitted if one.plan is step.states)
        for leader, num_tokens, slot in submitted.for_forks:
            held = self._held.get(leader)
            if held is not None and num_tokens not in held.for_forks:
                held.for_forks[num_tokens] = self._cache.share(slot)
        writes, ends = submitted.plan.writes.tolist(), step.ends.tolist()
        for i, seq in enumerate(step.seqs):
            if seq.row < 0:
                continue
            held = self._held[seq]
            if self._table.num_computed[seq.row] == ends[i]:
                self._move(held, writes[i])
            elif i in submitted.before:
                self._move(held, submitted.before[i])
                held.later = self._cache.share(writes[i]) if seq.is_parked else NO_STATE
            else:
                self._lost.append(seq)
        for slot in submitted.owned:
            self._cache.free(slot)
        submitted.owned = []

    def take_lost(self) -> Iterator[Sequence]:
        """Yield the running sequences that must start over: no slot was left to keep a state that they need again."""
        while self._lost:
            seq = self._lost.pop()
            if seq.row >= 0:
                yield seq

    def commit(self, step: Step, failed: Collection[Sequence]) -> None:
        """Enter the snapshots of a computed step. Those of sequences with logits that are not finite go."""
        submitted = self._submitted.popleft()
        if submitted.plan is not step.states:
            raise InvariantError("steps are committed in another order than they were planned in")
        for snapshot in submitted.snapshots:
            if snapshot.seq not in failed:
                self._enter(snapshot)
            self._cache.free(snapshot.slot)
        for seq in failed:
            if (held := self._held.get(seq)) is not None:
                for known in held.used:
                    self._cache.drop(known)

    def is_intact(self, seq: Sequence, step: Step) -> bool:
        """Return whether a step that failed in the middle left the state of a running sequence as it was."""
        if seq not in step.seqs or step.states is None:
            return True
        i = step.seqs.index(seq)
        read = step.states.reads[i]
        return bool(read == NO_STATE or (read != step.states.writes[i] and read not in step.states.saves[:, 1]))

    def drop_submitted(self) -> None:
        """Free what the submitted steps hold: all of them failed."""
        for submitted in self._submitted:
            for slot in (*submitted.owned, *(snapshot.slot for snapshot in submitted.snapshots)):
                self._cache.free(slot)
        self._submitted.clear()

    def lose_all(self) -> None:
        """Forget the submitted steps and all snapshots: no slot has its content any more."""
        self.drop_submitted()
        self._cache.drop_all()

    def check_integrity(self, seqs: Collection[Sequence]) -> None:
        """Raise InvariantError unless these sequences have slots, and reference counts agree. O(slots), for tests."""
        if self._held.keys() != set(seqs):
            raise InvariantError("other sequences have states than those that run or are swapped")
        counts: Counter[int] = Counter()
        for held in self._held.values():
            counts.update((held.slot, held.later, *held.for_forks.values()))
        for submitted in self._submitted:
            counts.update((*submitted.owned, *(snapshot.slot for snapshot in submitted.snapshots)))
        del counts[NO_STATE]
        self._cache.check_integrity(counts)

    # --- the parts of a plan

    def _chunks(self, step: Step) -> list[_Chunk]:
        starts, ends, sampled, first = step.starts.tolist(), step.ends.tolist(), set(step.sampled.tolist()), 0
        chunks = []
        for i, (seq, start, end) in enumerate(zip(step.seqs, starts, ends, strict=True)):
            held = self._held[seq]
            if (start == 0) != (held.slot == NO_STATE):
                raise InvariantError(f"{seq.request_id} computes token {start} from slot {held.slot}")
            self._cache.free(held.later)
            held.later = NO_STATE
            may_repeat = i in sampled and (seq.beams is not None or seq in self._table.guides)
            chunks.append(_Chunk(seq, held, start, end, first, may_repeat, held.slot))
            first += end - start
        return chunks

    def _place(self, chunk: _Chunk, planned: _Submitted) -> None:
        """Choose the slot for the state after a chunk."""
        read, cache = chunk.read, self._cache
        if not chunk.may_repeat and cache.is_private(read):
            chunk.write = read
            return
        slot = self._take()
        if slot is None and cache.has_one_holder(read):
            cache.uncache(read)
            chunk.write = read
        elif slot is None:
            raise InvariantError(f"no state slot is free for {chunk.seq.request_id}")
        else:
            chunk.write = slot
            planned.owned.append(slot)

    def _save_for_forks(self, chunk: _Chunk, planned: _Submitted) -> None:
        """Save the states that forks start from."""
        for at in {fork.num_to_share for fork in chunk.seq.forks} - chunk.held.for_forks.keys():
            if at == chunk.end:
                planned.for_forks.append((chunk.seq, at, chunk.write))
            elif chunk.start < at < chunk.end:
                slot = self._save_within(chunk, at, planned, is_needed=True)
                if slot is None:
                    raise InvariantError(f"no state slot is free for the forks of {chunk.seq.request_id}")
                planned.for_forks.append((chunk.seq, at, slot))

    def _save_before(self, i: int, chunk: _Chunk, planned: _Submitted) -> None:
        """Keep the state before the last token of a chunk, if a slot is left."""
        at = chunk.end - 1
        if at == chunk.start:
            if chunk.write != chunk.read:
                planned.before[i] = chunk.read
        elif (slot := self._save_within(chunk, at, planned)) is not None:
            planned.before[i] = slot

    def _save_snapshots(self, chunk: _Chunk, planned: _Submitted) -> None:
        """Save the states that later prompts may start from, if slots are left."""
        seq, size, end = chunk.seq, self._block_size, chunk.end
        wanted = {at for at in chunk.held.wanted if chunk.start < at <= end}
        is_decoding = chunk.start + 1 == end >= seq.num_prompt_tokens and seq.beams is None
        if is_decoding and end % size == 0 and self._memory.caches_prefixes:
            wanted.add(end)
        for at in wanted:
            # The hash of a block whose last token is still sampled is not known yet.
            known = next(iter(seq.block_hashes[at // size - 1 : at // size]), None)
            if known is not None and self._is_saved(known, planned):
                continue
            slot = chunk.write if at == end else self._save_within(chunk, at, planned)
            if slot is not None:
                planned.snapshots.append(_Snapshot(seq, at, self._cache.share(slot), known))

    def _is_saved(self, block_hash: bytes, planned: _Submitted) -> bool:
        """Return whether there is a snapshot behind a block, or one is computed."""
        if self._cache.find(block_hash) is not None:
            return True
        computed = (snapshot for one in (*self._submitted, planned) for snapshot in one.snapshots)
        return any(snapshot.block_hash == block_hash for snapshot in computed)

    def _save_within(self, chunk: _Chunk, at: int, planned: _Submitted, *, is_needed: bool = False) -> int | None:
        """Save the state after `at` tokens, within a chunk. Return its slot, or None if none is left."""
        if at in chunk.inner:
            return chunk.inner[at]
        slot: int | None
        if at + 1 == chunk.end and chunk.write != chunk.read and self._cache.is_private(chunk.read):
            slot = chunk.read
        else:
            slot = self._take() if is_needed else self._cache.take()
            if slot is None:
                return None
            planned.owned.append(slot)
        chunk.inner[at] = slot
        return slot

    def _take(self) -> int | None:
        """Return a slot. If all are held, give up snapshots that are still computed."""
        slot = self._cache.take()
        for submitted in self._submitted:
            while slot is None and submitted.snapshots:
                self._cache.free(submitted.snapshots.pop().slot)
                slot = self._cache.take()
        return slot

    def _move(self, held: _Held, slot: int) -> None:
        """Let another slot be the one with the state of a sequence."""
        if slot != held.slot:
            self._cache.share(slot)
            self._cache.free(held.slot)
            held.slot = slot

    def _enter(self, snapshot: _Snapshot) -> None:
        """Enter a computed snapshot, unless its block is no longer cached."""
        seq, count = snapshot.seq, snapshot.num_tokens // self._block_size
        if len(seq.block_hashes) < count or not self._memory.has(seq.block_hashes[count - 1]):
            return
        known, held = seq.block_hashes[count - 1], self._held.get(seq)
        is_new = self._cache.enter(snapshot.slot, known, seq.tenant, seq.weight)
        if held is None:
            return
        if is_new:
            held.used.append(known)
        if snapshot.num_tokens >= seq.num_prompt_tokens:
            before, held.answer = held.answer, known if is_new else None
            if before is not None and self._cache.is_unheld(before):
                self._cache.drop(before)
                held.used.remove(before)
