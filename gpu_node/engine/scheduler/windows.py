"""The windows of running sequences: which blocks each holds in the layers that see no token before its window.

A sequence's table has the indices of its table for the other layers. Blocks behind the window are freed as soon as
their tokens cannot be read any more; their entries become NULL_BLOCK. Blocks before the end of a step are taken when it
is planned, not when a sequence starts, so a long prompt never holds more than a window and a step's tokens.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import numpy as np

from penstock.contract.errors import InvariantError
from penstock.gpu_node.engine.kv_cache.windows import WindowCache
from penstock.gpu_node.engine.scheduler.input_batch import InputBatch
from penstock.gpu_node.engine.sequence import Sequence
from penstock.gpu_node.engine.steps import Ints, Rows, Step
from penstock.gpu_node.model.protocol import NULL_BLOCK, StepWindows


@dataclass(slots=True)
class _Held:
    """The blocks of a sequence that has a row or is swapped."""

    row: int
    """-1 while it is swapped."""
    first: int = 0
    """The index of its first block in the table."""
    blocks: list[int] = field(default_factory=list)
    spare: int | None = None
    """Of a fork: a block for its copy of the last shared block, or for the tokens after that block."""
    keys: list[bytes] = field(default_factory=list)
    """While it is swapped: the keys under which its blocks are kept, unless these are needed."""

    @property
    def end(self) -> int:
        """The index behind its last block."""
        return self.first + len(self.blocks)


@dataclass(slots=True, eq=False)
class _Submitted:
    """The blocks whose content a submitted step makes."""

    plan: StepWindows
    written: set[int]
    """Blocks of the first tokens that it computes, and those that it fills and that the cache lists."""
    copied: set[int]


class SequenceWindows:
    """Gives sequences the blocks of their windows, and steps their `StepWindows`."""

    def __init__(self, cache: WindowCache, table: InputBatch, block_size: int, max_step_tokens: int) -> None:
        """`max_step_tokens`: the most tokens that a step computes."""
        self._cache = cache
        self._table = table
        self._block_size = block_size
        self.blocks_of_step = -(-max_step_tokens // block_size)
        """The most blocks that the tokens of a step fill."""
        self.blocks_of_sequence = cache.blocks_of_window + 1
        """The most blocks of a sequence, without those of a step's further tokens."""
        self.blocks_alone = min(self.blocks_of_sequence, cache.pool.num_total)
        """The most blocks with which a sequence that runs alone goes on, if only token by token."""
        num_rows, width = table.shape_of_tables
        self._tables = np.full((num_rows, width), NULL_BLOCK, dtype=np.int32)
        self._firsts, self._ends = np.zeros(num_rows, dtype=np.int32), np.zeros(num_rows, dtype=np.int32)
        """The index of each row's first block, and that behind its last one."""
        self._held: dict[Sequence, _Held] = {}
        self._entered: set[int] = set()
        """Blocks that were cached since the newest step was planned."""
        self._submitted: deque[_Submitted] = deque()
        """The oldest first."""
        self._unmade, self._uncopied = set[int](), set[int]()
        """The blocks that the steps that failed last would have stored or copied, and the latter alone."""

    # --- how many blocks are free

    @property
    def num_free(self) -> int:
        """Blocks that no sequence holds."""
        return self._cache.pool.num_free

    @property
    def max_group(self) -> int:
        """The most choices of a request that may start together: each holds a block until the prompt is computed."""
        return max(1, self._cache.pool.num_total - self.blocks_alone + 1)

    def num_missing(self, seq: Sequence, num_blocks: int, most: int) -> int:
        """Return how many blocks must be free for a waiting sequence that needs `most` blocks at most.

        It starts with the first `num_blocks` blocks of its text. Its forks hold a block each.
        """
        hits = self._starts_with(seq, num_blocks)
        num_needed = -(-len(seq.token_ids) // self._block_size) - (num_blocks - len(hits))
        return max(0, min(num_needed, most) - len(hits)) + len(seq.forks) + self._cache.num_unheld(hits)

    def num_held(self, seq: Sequence) -> int:
        """Return how many blocks a sequence holds."""
        held = self._held.get(seq)
        return 0 if held is None else len(held.blocks) + (held.spare is not None)

    def num_promised(self) -> int:
        """Return how many more blocks the windows of running sequences take for the tokens that they have."""
        rows = [held.row for held in self._held.values() if held.row >= 0 and held.spare is None]
        lasts = -(-self._table.num_tokens[rows] // self._block_size)
        steady = np.minimum(lasts - self._firsts[rows], self.blocks_of_sequence)
        return int(np.maximum(steady - (self._ends[rows] - self._firsts[rows]), 0).sum())

    def lacking(self, rows: Rows, ends: Ints) -> Ints:
        """Return how many blocks each of some rows lacks to compute up to `ends` tokens."""
        lacking: Ints = np.maximum(-(-ends // self._block_size) - self._ends[rows], 0)
        return lacking

    def grow(self, seq: Sequence, end: int) -> int:
        """Take the blocks up to `end` tokens, as far as blocks are free. Return how many tokens they reach."""
        held = self._held[seq]
        count = min(-(-end // self._block_size) - held.end, self.num_free)
        if count > 0:
            self._append(held, self._cache.take(count))
        return min(end, held.end * self._block_size)

    # --- sequences that start, pause, branch and end

    def num_usable(self, seq: Sequence, num_blocks: int) -> int:
        """Return with how many of so many cached blocks a waiting sequence can start: those before a cached window.

        Its forks read what it computes, so it starts before the first of them.
        """
        count = min((fork.num_to_share // self._block_size for fork in seq.forks), default=num_blocks)
        count = at = min(count, num_blocks)
        while at > self._cache.first_block(count * self._block_size):
            at -= 1
            if self._cache.find(seq.block_hashes[at]) is None:
                # Every window that ends behind this block, and not behind the present one, has it.
                count = at
        return count

    def _starts_with(self, seq: Sequence, num_blocks: int) -> list[int]:
        """Return the blocks with which a waiting sequence starts: those that it left, or a cached window."""
        held = self._held.get(seq)
        first = self._cache.first_block(num_blocks * self._block_size)
        keys = seq.block_hashes[first:num_blocks] if held is None else held.keys
        return [block for key in keys if (block := self._cache.find(key)) is not None]

    def start(self, seq: Sequence, num_stored: int, num_matched: int) -> None:
        """Give a sequence that starts the window before `num_stored`. `num_matched`: tokens with cached blocks."""
        self._cache.missed_tokens += num_matched - num_stored
        first, num_blocks = self._cache.first_block(num_stored), num_stored // self._block_size
        blocks = self._starts_with(seq, num_blocks)
        if len(blocks) != num_blocks - first:
            raise InvariantError(f"{seq.request_id} starts at token {num_stored} without its window")
        self._cache.hold(blocks)
        self._give_row(seq, _Held(seq.row), first, blocks)
        for fork in seq.forks:
            self._give_row(fork, _Held(fork.row, spare=self._cache.take(1)[0]), 0, [])

    def swap_out(self, seq: Sequence, num_stored: int) -> None:
        """Keep the blocks of a sequence that is swapped as long as no other one needs them."""
        held, size = self._held[seq], self._block_size
        num_kept, num_full = -(-num_stored // size) - held.first, num_stored // size - held.first
        blocks, hashes = held.blocks, seq.block_hashes[held.first : held.first + num_full]
        self._cache.pool.free(blocks[num_kept:])
        known = [*hashes, *[None] * (num_kept - len(hashes))]
        held.keys = [
            self._cache.leave(block, block_hash, seq.tenant, seq.weight)
            for block, block_hash in zip(blocks[:num_kept], known, strict=True)
        ]
        self._clear_row(held)
        held.row, held.blocks = -1, []

    def is_lost(self, seq: Sequence) -> bool:
        """Return whether a block of a swapped sequence was needed, so that it must be computed again."""
        held = self._held.get(seq)
        return held is not None and any(self._cache.find(key) is None for key in held.keys)

    def resume(self, seq: Sequence) -> None:
        """Give a swapped sequence its blocks back."""
        held = self._held[seq]
        blocks = self._starts_with(seq, 0)
        if len(blocks) != len(held.keys):
            raise InvariantError(f"{seq.request_id} resumes without its window")
        self._cache.hold(blocks)
        self._cache.forget(held.keys)
        self._give_row(seq, _Held(seq.row), held.first, blocks)

    def release(self, seq: Sequence) -> None:
        """Free the blocks of a sequence, if it has any."""
        held = self._held.pop(seq, None)
        if held is None:
            return
        self._cache.forget(held.keys)
        self._clear_row(held)
        self._cache.pool.free(held.blocks)
        if held.spare is not None:
            self._cache.pool.free([held.spare])

    def share(self, leader: Sequence, fork: Sequence) -> None:
        """Let a fork that starts read the window of its leader before the tokens that both have."""
        of_leader, held, size = self._held[leader], self._held[fork], self._block_size
        num_blocks, first = -(-fork.num_to_share // size), self._cache.first_block(fork.num_to_share)
        if first < min(of_leader.first, num_blocks):
            raise InvariantError(f"{leader.request_id} has freed the window of a fork")
        blocks = of_leader.blocks[max(0, first - of_leader.first) : max(0, num_blocks - of_leader.first)]
        self._cache.hold(blocks)
        self._give_row(fork, held, first, blocks)
        if fork.num_to_share % size == 0:
            self._use_spare(held)

    def own_last(self, seq: Sequence) -> None:
        """Copy the shared last block of a newly started fork."""
        held = self._held.get(seq)
        if held is not None and held.spare is not None:
            self._own_last(held)

    def branch(self, pairs: Items[tuple[Sequence, Sequence]]) -> None:
        """Let beams continue from other beams: pairs of a sequence and the one that becomes its copy.

        The last block is copied unless it is full. Its copy is a block that some beam gives up here.
        """
        for source, _ in pairs:
            self._cache.hold(self._held[source].blocks)
        given = [(self._held[source].first, self._held[source].blocks.copy()) for source, _ in pairs]
        for _, target in pairs:
            held = self._held[target]
            self._clear_row(held)
            self._cache.pool.free(held.blocks)
        for (source, target), (first, blocks) in zip(pairs, given, strict=True):
            held = self._held[target]
            self._give_row(target, held, first, blocks)
            if self._table.num_tokens[source.row] % self._block_size == 0:
                if held.spare is not None:
                    self._cache.pool.free([held.spare])
                    held.spare = None
                continue
            if held.spare is None:
                held.spare = self._cache.take(1)[0]
            self._own_last(held)

    # --- steps

    def enter(self, seq: Sequence, at: int) -> None:
        """Cache a block that a step fills, if the sequence still holds it."""
        held = self._held[seq]
        if held.first <= at < held.end:
            block = held.blocks[at - held.first]
            self._cache.enter(block, seq.block_hashes[at], seq.tenant, seq.weight)
            self._entered.add(block)

    def plan(self, step: Step) -> StepWindows:
        """Return the tables of a step, and the copies that come first."""
        size = self._block_size
        width = -(-max(step.ends.tolist()) // size)
        copies = self._cache.take_copies()
        firsts = self._tables[step.rows, step.starts // size]
        planned = StepWindows(self._tables[:, :width][step.rows], copies)
        written = self._entered | set(firsts.tolist())
        self._submitted.append(_Submitted(planned, written - {NULL_BLOCK}, set(copies[:, 1].tolist())))
        self._entered = set()
        return planned

    def free_behind(self, step: Step) -> None:
        """Free the blocks that no later token of a step's sequences reads, maybe while the step still runs."""
        firsts = self._cache.first_blocks(self._table.num_computed[step.rows])
        for i in (firsts > self._firsts[step.rows]).nonzero()[0].tolist():
            seq = step.seqs[i]
            if seq.row >= 0:
                self._free_before(self._held[seq], int(firsts[i]))

    def commit(self, step: Step) -> None:
        """Note that a step is computed."""
        submitted = self._submitted.popleft()
        if submitted.plan is not step.windows:
            raise InvariantError("steps are committed in another order than they were planned in")

    def uncache_unheld(self, seq: Sequence) -> None:
        """Remove a sequence's blocks from the cache that no sequence holds."""
        self._cache.drop(seq.block_hashes)

    def roll_back(self) -> None:
        """Uncache what the submitted steps would have stored or copied: all of them failed."""
        self._uncopied = set[int]().union(*(one.copied for one in self._submitted))
        self._unmade = self._entered.union(self._uncopied, *(one.written for one in self._submitted))
        self._cache.uncache(self._unmade)
        self._submitted.clear()
        self._entered = set()

    def is_intact(self, seq: Sequence) -> bool:
        """Return whether a running sequence keeps all it computed, after `roll_back`."""
        held = self._held[seq]
        num_full = int(self._table.num_computed[seq.row]) // self._block_size
        full = held.blocks[: max(0, num_full - held.first)]
        return self._uncopied.isdisjoint(held.blocks) and self._unmade.isdisjoint(full)

    def lose_all(self) -> None:
        """Forget the submitted steps and all cached blocks: none has its content any more."""
        self._submitted.clear()
        self._entered = set()
        self._cache.drop_all()

    def check_integrity(self, seqs: Collection[Sequence]) -> None:
        """Raise InvariantError unless these sequences have blocks, and reference counts agree. O(blocks), for tests."""
        if self._held.keys() != set(seqs):
            raise InvariantError("other sequences have windows than those that run or are swapped")
        counts: Counter[int] = Counter()
        for seq, held in self._held.items():
            counts.update(held.blocks)
            counts.update([] if held.spare is None else [held.spare])
            if held.row != seq.row:
                raise InvariantError(f"{seq.request_id} has row {seq.row}, and its window row {held.row}")
            if held.row < 0:
                continue
            table = self._tables[held.row]
            if table[held.first : held.end].tolist() != held.blocks or np.count_nonzero(table) != len(held.blocks):
                raise InvariantError(f"row {held.row} lists other blocks than its window has")
            num_computed = int(self._table.num_computed[held.row])
            needed = range(self._cache.first_block(num_computed), -(-num_computed // self._block_size))
            if not seq.forks and needed and (held.first > needed.start or held.end < needed.stop):
                raise InvariantError(f"row {held.row} lacks blocks of its window")
        unused = {one.row for one in self._held.values()}
        if any(self._tables[row].any() for row in range(len(self._tables)) if row not in unused):
            raise InvariantError("a row without a sequence lists blocks of windows")
        self._cache.check_integrity(counts)

    # --- tables

    def _give_row(self, seq: Sequence, held: _Held, first: int, blocks: list[int]) -> None:
        """Let a sequence hold these blocks, from index `first` on, in its row."""
        self._held[seq] = held
        held.row, held.first, held.blocks = seq.row, first, blocks
        self._tables[held.row, first : held.end] = blocks
        self._firsts[held.row], self._ends[held.row] = first, held.end

    def _clear_row(self, held: _Held) -> None:
        if held.row >= 0:
            self._tables[held.row, held.first : held.end] = NULL_BLOCK

    def _append(self, held: _Held, blocks: list[int]) -> None:
        self._tables[held.row, held.end : held.end + len(blocks)] = blocks
        held.blocks += blocks
        self._ends[held.row] = held.end

    def _free_before(self, held: _Held, first: int) -> None:
        """Free a row's blocks before an index."""
        count = min(first, held.end) - held.first
        self._tables[held.row, held.first : held.first + count] = NULL_BLOCK
        self._cache.pool.free(held.blocks[:count])
        del held.blocks[:count]
        held.first += count
        self._firsts[held.row] = held.first

    def _use_spare(self, held: _Held) -> None:
        if held.spare is not None:
            self._append(held, [held.spare])
            held.spare = None

    def _own_last(self, held: _Held) -> None:
        """Replace the last block by one that only this sequence holds, with the same content."""
        if held.spare is None or not held.blocks:
            raise InvariantError("a fork has no window to copy")
        held.blocks[-1] = self._cache.own(held.blocks[-1], held.spare)
        held.spare = None
        self._tables[held.row, held.end - 1] = held.blocks[-1]
