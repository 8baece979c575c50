"""The running batch: how running sequences get rows and blocks, share them and release them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import numpy as np

from penstock.contract.errors import InvariantError
from penstock.gpu_node.engine.kv_cache.manager import KvCacheManager
from penstock.gpu_node.engine.scheduler.beside import BesideBlocks
from penstock.gpu_node.engine.scheduler.input_batch import InputBatch, TokenGuide
from penstock.gpu_node.engine.sequence import Sequence
from penstock.gpu_node.engine.steps import Ints, Rows, Step
from penstock.gpu_node.model.protocol import FAILED_TOKEN


@dataclass(slots=True)
class StepOutcome:
    """The result of a step: a token or FAILED_TOKEN for each of `seqs`, which may have been removed meanwhile.

    A sequence with an accepted draft is listed once for each token that it got.
    """

    seqs: list[Sequence]
    token_ids: list[int]
    samples: Items[int]
    """The index of each among the step's samples."""
    ended: set[Sequence] = field(default_factory=set)
    """Sequences that the scheduler removed, because their token ends them or is FAILED_TOKEN."""
    faulty: Sequence | None = None
    """A sequence to drop because its steps are too slow."""

    @property
    def failed(self) -> list[Sequence]:
        """The sequences that got FAILED_TOKEN."""
        return [seq for seq, token in zip(self.seqs, self.token_ids, strict=True) if token == FAILED_TOKEN]


class StepProgress:
    """Counts each step when it completes, or one step before that, so that the next one can be planned.

    The samples of a step that still runs are unknown. Until it completes, -1 - i stands for its i-th sample; runners
    know this notation. A sequence that reaches its limit with such a token keeps its row and blocks, and computes no
    more.
    """

    def __init__(self, batch: RunningBatch) -> None:
        self.assumed: Step | None = None
        """The step that is counted but not computed yet."""
        self._batch = batch
        self._table = batch.table

    def assume(self, step: Step) -> None:
        """Count a step that still runs."""
        if self.assumed is not None:
            raise InvariantError("a step is planned two steps ahead of what is computed")
        self._count(step, -1 - np.arange(len(step.sampled), dtype=np.int32))
        self.assumed = step
        for i in self._at_limit(step):
            if step.sampled_seqs[i].row >= 0:
                self._batch.await_last_token(step.sampled_seqs[i])

    def complete(self, step: Step, tokens: Ints) -> list[int]:
        """Count a computed step, or write the tokens of one counted before. Return the samples that end their sequence.

        A sample ends its sequence by FAILED_TOKEN, by an end token or by the length limit.
        """
        if self.assumed is step:
            self.assumed = None
            here = self._present_samples(step)
            self._table.set_tokens(step.sampled_rows[here], step.sampled_ends[here], tokens[here])
        else:
            self._count(step, tokens)
        token_ids = tokens.tolist()
        return [i for i in self._may_end(step, token_ids) if self._ends(step, i, token_ids[i])]

    def revert(self) -> bool:
        """Drop the expected tokens of a failed step that was counted. Return whether there was one."""
        step, self.assumed = self.assumed, None
        if step is not None:
            self._table.num_tokens[step.sampled_rows[self._present_samples(step)]] -= 1
        return step is not None

    def _count(self, step: Step, tokens: Ints) -> None:
        # A removed sequence's row is written as well: no sequence gets that row before the next step is scheduled.
        self._table.append(step.sampled_rows, step.sampled_ends, tokens)
        # At least one token stays uncomputed: its computation yields the next token.
        self._table.num_computed[step.rows] = np.minimum(step.ends, self._table.num_tokens[step.rows] - 1)
        self._batch.beside.count(step)
        self._batch.start_forks()
        self._batch.beside.free_behind(step)

    def _present_samples(self, step: Step) -> list[int]:
        """Return the samples of sequences that still have their row; other sequences may have the rows of the rest."""
        return [i for i, seq in enumerate(step.sampled_seqs) if seq.row >= 0]

    def _at_limit(self, step: Step) -> list[int]:
        found: list[int] = (step.sampled_ends + 1 >= self._table.limit[step.sampled_rows]).nonzero()[0].tolist()
        return found

    def _may_end(self, step: Step, token_ids: list[int]) -> list[int]:
        """Return the samples that may end their sequence, by a check of all tokens at once."""
        end_ids = self._batch.end_ids
        if end_ids.isdisjoint(token_ids):
            return self._at_limit(step)
        return sorted({*self._at_limit(step), *(i for i, token_id in enumerate(token_ids) if token_id in end_ids)})

    def _ends(self, step: Step, i: int, token_id: int) -> bool:
        seq = step.sampled_seqs[i]
        if token_id == FAILED_TOKEN:
            return True
        num_output_tokens = int(step.sampled_ends[i]) + 1 - seq.num_prompt_tokens
        return seq.row >= 0 and seq.end_rule.reason(token_id, num_output_tokens) is not None


class DelayedRows:
    """Running sequences that skip steps: until their token mask is ready, or, as parked beams, until all beams are.

    They keep rows and blocks, and compute nothing meanwhile.
    """

    def __init__(self, guides: Mapping[Sequence, TokenGuide]) -> None:
        self._guides = guides
        self._seqs: set[Sequence] = set()
        self._parked: set[Sequence] = set()

    def add(self, seqs: Iterable[Sequence]) -> None:
        """Delay sequences until their mask is ready."""
        self._seqs.update(seqs)

    def park(self, seq: Sequence) -> None:
        """Delay a beam until it is no longer parked."""
        seq.is_parked = True
        self._parked.add(seq)

    def cut(self, seqs: Items[Sequence], starts: Ints, ends: Ints) -> Ints:
        """Return the end positions of sequences in a step that skips the delayed ones.

        If no other sequence would compute anything, they take part, and the step waits for their masks.
        """
        if not self._seqs and not self._parked:
            return ends
        self._seqs &= {seq for seq, guide in self._guides.items() if seq.row >= 0 and guide.is_waiting}
        self._parked = {seq for seq in self._parked if seq.is_parked}
        held = [i for i in range(len(ends)) if seqs[i] in self._seqs or seqs[i] in self._parked]
        without = ends.copy()
        without[held] = starts[held]
        return without if (without > starts).any() else ends


class RunningBatch:
    """Running sequences in order of admission, with the forks that wait for their prompt.

    The `forks` of a running sequence hold a row and one block each. When the prompt is stored, they share its blocks
    and run. Each fork copies the last block before it writes to it, unless that block is full.
    """

    def __init__(self, memory: KvCacheManager, beside: BesideBlocks, rows: InputBatch, block_size: int) -> None:
        self.seqs: list[Sequence] = []
        self.awaiting_last_token: list[Sequence] = []
        """Sequences that compute no more and only wait for their last token."""
        self.table = rows
        self.beside = beside
        self._memory = memory
        self._block_size = block_size
        self._leaders: list[Sequence] = []
        self._sharing: list[Sequence] = []
        """Forks that just started; other sequences may hold their last block as well."""
        self._changed()

    def _changed(self) -> None:
        self._rows: Rows | None = None
        self._end_ids: frozenset[int] | None = None
        self._weights: dict[str, float] | None = None

    @property
    def rows(self) -> Rows:
        """Rows of the running sequences; the same array until the batch changes."""
        if self._rows is None:
            self._rows = np.array([seq.row for seq in self.seqs], dtype=np.intp)
        return self._rows

    @property
    def present(self) -> list[Sequence]:
        """All sequences with rows, except forks that wait for their prompt."""
        return self.awaiting_last_token + self.seqs

    @property
    def end_ids(self) -> frozenset[int]:
        """Every token that may end one of the sequences."""
        if self._end_ids is None:
            self._end_ids = frozenset((FAILED_TOKEN,)).union(*(seq.end_rule.end_ids for seq in self.seqs))
        return self._end_ids

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each tenant with a running foreground sequence."""
        if self._weights is None:
            self._weights = {seq.tenant: seq.weight for seq in self.seqs if not seq.background}
        return self._weights

    def num_tokens(self, seq: Sequence) -> int:
        """Return the number of tokens of a running sequence, prompt included."""
        return int(self.table.num_tokens[seq.row])

    def held_by(self, seq: Sequence) -> list[int]:
        """Return the blocks that a waiting sequence starts with: its own when it is swapped, else a cached prefix."""
        if seq.blocks:
            return seq.blocks
        blocks = self._match(seq)
        return blocks if self.beside.is_empty else blocks[: self.beside.num_usable(seq, len(blocks))]

    def _match(self, seq: Sequence) -> list[int]:
        """Return the blocks of the longest cached prefix of a waiting sequence."""
        seq.hash_full_blocks(seq.token_ids, self._block_size)
        return self._memory.match(seq.block_hashes[: seq.num_reusable // self._block_size])

    def num_missing(self, seq: Sequence, held: list[int], *, in_place: bool = False) -> int:
        """Return how many blocks a waiting sequence and its forks need besides `held`, for all of their tokens.

        Blocks held on the host must be copied to the device, so they count as missing unless it runs `in_place`.
        """
        num_usable = len(held) if in_place else sum(map(self._memory.is_on_device, held))
        return self.num_blocks(len(seq.token_ids)) + len(seq.forks) - num_usable

    def admit(self, seq: Sequence, held: list[int], *, in_place: bool) -> int:
        """Start a waiting sequence with all blocks that it needs. Return how many of its tokens are stored."""
        is_swapped = bool(seq.blocks)
        num_stored = seq.num_stored if is_swapped else len(held) * self._block_size
        num_matched = 0 if is_swapped or self.beside.is_empty else len(self._match(seq)) * self._block_size
        if not is_swapped:
            self._memory.hold(held)
        seq.blocks = []
        for one in (seq, *seq.forks):
            self.table.take(one)
        # Blocks that are evicted for it take what stands beside them along, so this comes before that.
        if is_swapped:
            self.beside.resume(seq)
        else:
            self.beside.start(seq, num_stored, num_matched)
        hashes = seq.block_hashes[: num_stored // self._block_size]
        blocks = held if in_place else self._memory.bring_in(held, hashes)
        self.table.add_blocks(seq, blocks)
        self.table.mark_stored(seq, num_stored)
        added = self._memory.alloc_anywhere(self.num_missing(seq, blocks, in_place=True))
        for fork in seq.forks:
            fork.spare = added.pop()
        self.table.add_blocks(seq, added)
        if seq.forks:
            self._leaders.append(seq)
        self.seqs.append(seq)
        self._changed()
        return num_stored

    def share_prefill(self, *, shortest_first: bool) -> None:
        """Order the prompts that are still computed, so that a step's budget goes to the tenants in turn.

        The first prompt of each tenant goes before the second one of any. Of these, the shortest goes first or the
        oldest. Sequences that decode stay in front.
        """
        lacking = self.table.num_tokens[self.rows] - self.table.num_computed[self.rows]
        prefilling = (lacking > 1).nonzero()[0].tolist()
        if len({self.seqs[i].tenant for i in prefilling}) < 2:
            return
        ranks: Counter[str] = Counter()
        keys: dict[int, tuple[int, int]] = {}
        for i in prefilling:
            tenant = self.seqs[i].tenant
            keys[i] = (1 + ranks[tenant], int(lacking[i]) if shortest_first else i)
            ranks[tenant] += 1
        order = sorted(range(len(self.seqs)), key=lambda i: keys.get(i, (0, i)))
        if order != list(range(len(self.seqs))):
            self.seqs[:] = [self.seqs[i] for i in order]
            self._changed()

    def put_first(self, indices: list[int]) -> None:
        """Move the running sequences at ascending indices to the front."""
        if indices[-1] == len(indices) - 1:
            return
        chosen = set(indices)
        others = [seq for i, seq in enumerate(self.seqs) if i not in chosen]
        self.seqs[:] = [self.seqs[i] for i in indices] + others
        self._changed()

    def put_last(self, last: list[Sequence]) -> None:
        """Move running sequences behind the others, in the given order."""
        moved = set(last)
        order = [seq for seq in self.seqs if seq not in moved] + last
        if order != self.seqs:
            self.seqs[:] = order
            self._changed()

    def tenants_in_prefill(self) -> set[str]:
        """Return the tenants of running sequences that lack more than one token."""
        lacking = self.table.num_tokens[self.rows] - self.table.num_computed[self.rows]
        return {self.seqs[i].tenant for i in (lacking > 1).nonzero()[0].tolist()}

    def grow(self, seq: Sequence, num_blocks: int) -> None:
        """Give a running sequence more blocks."""
        self.table.add_blocks(seq, self._memory.alloc_anywhere(num_blocks))

    def leave(self, seq: Sequence) -> None:
        """Release the rows and blocks of a running sequence and its forks, or of one fork."""
        if seq in self._leaders:
            self._leaders.remove(seq)
        if seq in self.awaiting_last_token:
            self.awaiting_last_token.remove(seq)
        elif seq.forks_from is None:
            self.seqs.remove(seq)
            self._changed()
        for one in (seq, *seq.forks):
            self.table.give_back(one)
            self.beside.release(one)
            self._memory.free(one.blocks)
            if one.spare is not None:
                self._memory.free([one.spare])
                one.spare = None

    def await_last_token(self, seq: Sequence) -> None:
        """Exclude a running sequence from further steps; it keeps its row and blocks until its last token arrives."""
        self.seqs.remove(seq)
        self.awaiting_last_token.append(seq)
        self._changed()

    def swap_out(self, seq: Sequence) -> None:
        """Move the stored tokens of a running sequence without forks to host blocks, and release its row."""
        num_stored = int(self.table.num_computed[seq.row])
        kept = self.num_blocks(num_stored)
        self.beside.swap_out(seq, num_stored)
        self._memory.free(seq.blocks[kept:])
        seq.blocks, seq.num_stored = self._memory.swap_out(seq.blocks[:kept]), num_stored
        self.seqs.remove(seq)
        self._changed()
        self.table.give_back(seq)

    def start_forks(self) -> None:
        """Start the forks of sequences that have stored their prompt."""
        for leader in list(self._leaders):
            if self.table.num_computed[leader.row] >= leader.num_common:
                self._leaders.remove(leader)
                at = self.seqs.index(leader) + 1
                self.seqs[at:at] = leader.forks
                for fork in leader.forks:
                    self._share(leader, fork)
                leader.forks = []
                self.beside.forget_forks(leader)
                self._changed()

    def branch(self, pairs: Items[tuple[Sequence, Sequence]]) -> None:
        """Let beams continue from other beams: pairs of a sequence and the one that becomes its copy.

        Both share the full blocks. The last block is copied at once unless it is full: its copy is a block that some
        beam gives up here, so there is always a free one.
        """
        for source, target in pairs:
            self._memory.hold(source.blocks)
            if target.forks_from is not None:
                self._begin(target.forks_from, target)
        for _, target in pairs:
            self._memory.free(target.blocks)
        self.beside.branch(pairs)
        for source, target in pairs:
            self.table.copy(source, target)
            target.block_hashes = source.block_hashes.copy()
            spare, target.spare = target.spare, None
            if not self.table.num_tokens[source.row] % self._block_size:
                self._memory.free([] if spare is None else [spare])
                continue
            copy = self._memory.own(target.blocks[-1], self._memory.alloc(1)[0] if spare is None else spare)
            self.table.replace_block(target, len(target.blocks) - 1, copy)

    def _begin(self, leader: Sequence, fork: Sequence) -> None:
        """Let a waiting fork run."""
        leader.forks.remove(fork)
        fork.forks_from = None
        self.seqs.insert(self.seqs.index(leader) + 1, fork)
        if not leader.forks:
            self._leaders.remove(leader)
            self.beside.forget_forks(leader)
        self._changed()

    def num_tail_blocks(self, seq: Sequence) -> int:
        """Return how many blocks the forks of a waiting beam need for the tokens that only they have."""
        if seq.beams is None:
            return 0
        shared = seq.num_common // self._block_size
        return sum(max(0, self.num_blocks(len(fork.token_ids)) - shared - 1) for fork in seq.forks)

    def own_last_blocks(self) -> None:
        """Copy the shared last blocks of newly started forks, so that no sequence writes to a shared block."""
        for seq in self._sharing:
            if seq.spare is not None:
                block = self._memory.own(seq.blocks[-1], seq.spare)
                self.table.replace_block(seq, len(seq.blocks) - 1, block)
                self.beside.own_last(seq)
                seq.spare = None
        self._sharing.clear()

    def cache_full_blocks(self, seq: Sequence, num_tokens: int, cached: list[int]) -> None:
        """Enter the blocks that a step fills into the prefix cache at once, and append them to `cached`.

        Sequences admitted to the same step can share them, because a runner stores all keys before any query attends.
        """
        tokens = self.table.tokens_of(seq)[:num_tokens]
        num_full = len(tokens) // self._block_size  # drafted tokens may be rejected, so they do not count
        seq.hash_full_blocks(tokens, self._block_size)
        for i in range(int(self.table.num_cached[seq.row]) // self._block_size, num_full):
            self._memory.cache(seq.blocks[i], seq.block_hashes[i], seq.tenant, seq.weight)
            self.beside.enter(seq, i)
            cached.append(seq.blocks[i])
        self.table.num_cached[seq.row] = num_full * self._block_size

    def cache_filled_blocks(self, seqs: list[Sequence], rows: Rows, ends: Ints, cached: list[int]) -> None:
        """Enter the blocks that sequences fill up to `ends` into the prefix cache; all these tokens are known."""
        filling = ends - self.table.num_cached[rows] >= self._block_size
        for i in filling.nonzero()[0].tolist():
            if seqs[i].row >= 0:
                self.cache_full_blocks(seqs[i], int(ends[i]), cached)

    def first_blocks(self, step: Step) -> list[int]:
        """Return the block of the first token that each sequence of a step computes.

        It may be full and cached: a sequence whose mask was late computes its last token again.
        """
        starts = step.starts.tolist()
        return [
            seq.blocks[start // self._block_size]
            for seq, start in zip(step.seqs, starts, strict=True)
            if start // self._block_size < len(seq.blocks)
        ]

    def is_intact(self, seq: Sequence, unfilled: AbstractSet[int], uncopied: AbstractSet[int]) -> bool:
        """Return whether a running sequence keeps all it computed after a step left blocks unfilled or uncopied."""
        num_full = int(self.table.num_computed[seq.row]) // self._block_size
        return uncopied.isdisjoint(seq.blocks) and unfilled.isdisjoint(seq.blocks[:num_full])

    def uncache_unheld(self, seq: Sequence, blocks: list[int]) -> None:
        """Remove from the cache what a sequence has cached, blocks among it, and no sequence holds."""
        self._memory.uncache_unheld(blocks)
        self.beside.uncache_unheld(seq)

    def uncache(self, seq: Sequence) -> None:
        """Mark a running sequence's uncomputed blocks as not cached, so that they are cached again once filled."""
        self.table.num_cached[seq.row] = self.table.num_computed[seq.row] // self._block_size * self._block_size

    def num_blocks(self, num_tokens: int) -> int:
        """Return the number of blocks for `num_tokens` tokens."""
        return -(-num_tokens // self._block_size)

    def num_tokens_unused(self) -> int:
        """Return how many more tokens the held blocks have capacity for."""
        seqs = self._with_rows()
        # A shared last block counts once, for the sequence that computed the prompt.
        rows = [seq.row for seq in seqs if seq.spare is None]
        unused = int((self.table.capacity[rows] - self.table.num_computed[rows]).sum())
        return unused + self._block_size * (len(seqs) - len(rows))

    def check_integrity(self, swapped: Iterable[Sequence]) -> None:
        """Raise InvariantError unless rows, sequences and reference counts agree on the blocks held."""
        seqs = self._with_rows()
        self.table.check_integrity(seqs)
        held = Counter(block for seq in (*seqs, *swapped) for block in seq.blocks)
        held.update(seq.spare for seq in seqs if seq.spare is not None)
        self._memory.check_integrity(held)
        self.beside.check_integrity([*seqs, *swapped])
        if any(seq.forks and seq not in self._leaders for seq in self.seqs):
            raise InvariantError("forks and the sequences that they wait for disagree")

    def _with_rows(self) -> list[Sequence]:
        return [one for seq in self.present for one in (seq, *seq.forks)]

    def _share(self, leader: Sequence, fork: Sequence) -> None:
        num_shared = fork.num_to_share
        num_full = num_shared // self._block_size
        self.beside.share(leader, fork)
        blocks = leader.blocks[: self.num_blocks(num_shared)]
        self._memory.hold(blocks)
        self.table.add_blocks(fork, blocks)
        self.table.mark_stored(fork, num_shared)
        fork.block_hashes = leader.block_hashes[:num_full]
        fork.forks_from = None
        if len(blocks) > num_full:
            self._sharing.append(fork)
        elif fork.spare is not None:
            self.table.add_blocks(fork, [fork.spare])
            fork.spare = None
