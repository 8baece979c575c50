"""The running sequences: which rows and blocks they hold, how they get them, share them and give them back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Set as AbstractSet

import numpy as np

from penstock.contract.errors import InvariantError
from penstock.gpu_node.engine.kv_cache.manager import KvCacheManager
from penstock.gpu_node.engine.scheduler.input_batch import InputBatch
from penstock.gpu_node.engine.sequence import Sequence
from penstock.gpu_node.engine.steps import Ints, Rows
from penstock.gpu_node.model.protocol import FAILED_TOKEN


class RunningBatch:
    """Running sequences in order of admission, with those that wait for one of them to compute their prompt.

    The latter, the `forks` of a running sequence, have a row and one block each. When the prompt is stored they share
    its blocks and run; the last one, which is not full, each of them copies before it writes to it.
    """

    def __init__(self, memory: KvCacheManager, rows: InputBatch, block_size: int) -> None:
        self.seqs: list[Sequence] = []
        self.retired: list[Sequence] = []
        """Those that only wait for their last token."""
        self.table = rows
        self._memory = memory
        self._block_size = block_size
        self._leaders: list[Sequence] = []
        self._sharing: list[Sequence] = []
        """Those whose last block somebody else may hold as well."""
        self._changed()

    def _changed(self) -> None:
        self._rows: Rows | None = None
        self._end_ids: frozenset[int] | None = None

    @property
    def rows(self) -> Rows:
        """Their rows; the same array as long as nobody comes or goes."""
        if self._rows is None:
            self._rows = np.array([seq.row for seq in self.seqs], dtype=np.intp)
        return self._rows

    @property
    def present(self) -> list[Sequence]:
        """All but those that wait for one of them."""
        return self.retired + self.seqs

    @property
    def end_ids(self) -> frozenset[int]:
        """Every token that may end one of them."""
        if self._end_ids is None:
            self._end_ids = frozenset((FAILED_TOKEN,)).union(*(seq.end_rule.end_ids for seq in self.seqs))
        return self._end_ids

    def held_by(self, seq: Sequence) -> list[int]:
        """Blocks that a waiting sequence would start with: its own when it is swapped, else a known prefix."""
        if seq.blocks:
            return seq.blocks
        seq.hash_full_blocks(seq.token_ids, self._block_size)
        return self._memory.match(seq.block_hashes[: seq.num_reusable // self._block_size])

    def num_missing(self, seq: Sequence, held: list[int], *, in_place: bool = False) -> int:
        """Blocks beside `held` for all of a waiting sequence and its forks, not only for its first chunk.

        They and copies of the host blocks held must be the device's, unless it shall run `in_place`.
        """
        num_usable = len(held) if in_place else sum(map(self._memory.is_on_device, held))
        return self.num_blocks(len(seq.token_ids)) + len(seq.forks) - num_usable

    def admit(self, seq: Sequence, held: list[int], *, in_place: bool) -> int:
        """Let a waiting sequence run with all the blocks that it needs; how many tokens of it these hold already."""
        is_swapped = bool(seq.blocks)
        num_stored = seq.num_stored if is_swapped else len(held) * self._block_size
        if not is_swapped:
            self._memory.hold(held)
        names = seq.block_hashes[: num_stored // self._block_size]
        blocks = held if in_place else self._memory.bring_in(held, names)
        seq.blocks = []
        self.table.take(seq)
        self.table.add_blocks(seq, blocks)
        self.table.start_behind(seq, num_stored)
        added = self._memory.alloc_anywhere(self.num_missing(seq, blocks, in_place=True))
        for fork in seq.forks:
            self.table.take(fork)
            fork.spare = added.pop()
        self.table.add_blocks(seq, added)
        if seq.forks:
            self._leaders.append(seq)
        self.seqs.append(seq)
        self._changed()
        return num_stored

    def grow(self, seq: Sequence, num_blocks: int) -> None:
        """Give a running sequence more blocks."""
        self.table.add_blocks(seq, self._memory.alloc_anywhere(num_blocks))

    def leave(self, seq: Sequence) -> None:
        """Take row and blocks of a running sequence and its forks, or of a fork."""
        if seq in self._leaders:
            self._leaders.remove(seq)
        if seq in self.retired:
            self.retired.remove(seq)
        elif seq.forks_from is None:
            self.seqs.remove(seq)
            self._changed()
        for one in (seq, *seq.forks):
            self.table.give_back(one)
            self._memory.free(one.blocks)
            if one.spare is not None:
                self._memory.free([one.spare])
                one.spare = None

    def retire(self, seq: Sequence) -> None:
        """Let a running sequence keep what it holds and compute no more."""
        self.seqs.remove(seq)
        self.retired.append(seq)
        self._changed()

    def swap_out(self, seq: Sequence) -> None:
        """Take row and device blocks of a running sequence without forks; it keeps what they hold in host blocks."""
        num_stored = int(self.table.num_computed[seq.row])
        kept = self.num_blocks(num_stored)
        self._memory.free(seq.blocks[kept:])
        seq.blocks, seq.num_stored = self._memory.swap_out(seq.blocks[:kept]), num_stored
        self.seqs.remove(seq)
        self._changed()
        self.table.give_back(seq)

    def start_forks(self) -> None:
        """Let the forks run whose prompt is stored."""
        for leader in list(self._leaders):
            if self.table.num_computed[leader.row] >= leader.num_prompt_tokens:
                self._leaders.remove(leader)
                at = self.seqs.index(leader) + 1
                self.seqs[at:at] = leader.forks
                for fork in leader.forks:
                    self._share(leader, fork)
                leader.forks = []
                self._changed()

    def own_last_blocks(self) -> None:
        """See to it that whoever just began to share blocks writes to none that somebody else holds."""
        for seq in self._sharing:
            if seq.spare is not None:
                block = self._memory.own(seq.blocks[-1], seq.spare)
                self.table.replace_block(seq, len(seq.blocks) - 1, block)
                seq.spare = None
        self._sharing.clear()

    def name_full_blocks(self, seq: Sequence, num_tokens: int, named: list[int]) -> None:
        """Offer the blocks that a step fills to the prefix cache at once, so that its own newcomers can share them.

        They may read them in the same step because a runner stores all keys before any query attends.
        """
        tokens = self.table.tokens_of(seq)[:num_tokens]
        num_full = len(tokens) // self._block_size  # what was drafted may not stand
        seq.hash_full_blocks(tokens, self._block_size)
        for i in range(int(self.table.num_named[seq.row]) // self._block_size, num_full):
            self._memory.commit(seq.blocks[i], seq.block_hashes[i])
            named.append(seq.blocks[i])
        self.table.num_named[seq.row] = num_full * self._block_size

    def name_filled(self, seqs: list[Sequence], rows: Rows, ends: Ints, named: list[int]) -> None:
        """Offer to the prefix cache what sequences fill by getting so far; their tokens are known by then."""
        filling = ends - self.table.num_named[rows] >= self._block_size
        for i in filling.nonzero()[0].tolist():
            if seqs[i].row >= 0:
                self.name_full_blocks(seqs[i], int(ends[i]), named)

    def is_intact(self, seq: Sequence, unfilled: AbstractSet[int], uncopied: AbstractSet[int]) -> bool:
        """Whether a running sequence has what it computed, after a step did not fill some blocks and copy to others."""
        num_full = int(self.table.num_computed[seq.row]) // self._block_size
        return uncopied.isdisjoint(seq.blocks) and unfilled.isdisjoint(seq.blocks[:num_full])

    def unname(self, seq: Sequence) -> None:
        """Offer the blocks that a running sequence has not computed to the prefix cache once more."""
        self.table.num_named[seq.row] = self.table.num_computed[seq.row] // self._block_size * self._block_size

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks for so many tokens."""
        return -(-num_tokens // self._block_size)

    def num_tokens_unused(self) -> int:
        """Tokens that the blocks held have room for and nobody has stored."""
        seated = self._seated()
        # A last block that is shared still counts for the one that computed the prompt.
        rows = [seq.row for seq in seated if seq.spare is None]
        unused = int((self.table.capacity[rows] - self.table.num_computed[rows]).sum())
        return unused + self._block_size * (len(seated) - len(rows))

    def check_integrity(self, swapped: Iterable[Sequence]) -> None:
        """Raise InvariantError unless rows and blocks are held as rows, sequences and reference counts say."""
        seated = self._seated()
        self.table.check_integrity(seated)
        held = Counter(block for seq in (*seated, *swapped) for block in seq.blocks)
        held.update(seq.spare for seq in seated if seq.spare is not None)
        self._memory.check_integrity(held)
        if any(seq.forks and seq not in self._leaders for seq in self.seqs):
            raise InvariantError("forks and those that they wait for disagree")

    def _seated(self) -> list[Sequence]:
        return [one for seq in self.present for one in (seq, *seq.forks)]

    def _share(self, leader: Sequence, fork: Sequence) -> None:
        num_shared = fork.num_to_share
        num_full = num_shared // self._block_size
        blocks = leader.blocks[: self.num_blocks(num_shared)]
        self._memory.hold(blocks)
        self.table.add_blocks(fork, blocks)
        self.table.start_behind(fork, num_shared)
        fork.block_hashes = leader.block_hashes[:num_full]
        fork.forks_from = None
        if len(blocks) > num_full:
            self._sharing.append(fork)
        elif fork.spare is not None:
            self.table.add_blocks(fork, [fork.spare])
            fork.spare = None
