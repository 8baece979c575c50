"""The passes of a module over a step's tokens, with attention over our KV blocks and the states of our slots."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from penstock.contract.errors import InvariantError
from penstock.gpu_node.model.protocol import NO_STATE, StepPlan, StepStates
from penstock.gpu_node.model.torch_cpu.attention import AttentionGroup, KvCache, PagedAttention
from penstock.gpu_node.model.transformers_runner.attention import PackedCache, TextCache, running
from penstock.gpu_node.model.transformers_runner.observed import Observed, call, head_of
from penstock.gpu_node.model.transformers_runner.states import SlotStates, StateValues, rows_of


class PackedModule:
    """A module, the KV caches of its layers, and the states of its slots. Not thread-safe."""

    def __init__(
        self,
        module: nn.Module,
        observed: Observed,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        num_slots: int = 0,
        *,
        by_tokens: bool = False,
    ) -> None:
        """num_slots: of states; by_tokens: whether the module continues states by one token in a pass only."""
        self._module = module
        self._head = head_of(module)
        self._observed = observed
        self._paged = PagedAttention(observed.layers, num_blocks, block_size, dtype)
        self.caches = {
            at: KvCache(layer, num_blocks, block_size, dtype)
            for at, layer in enumerate(observed.layers)
            if observed.owns(at)
        }
        self.slots = SlotStates(observed.states, num_slots)
        self._by_tokens = by_tokens

    def compute(self, plan: StepPlan, wanted: NDArray[np.int64], num_logits: int) -> tuple[Tensor, Tensor]:
        """Run a step. Return the logits and hidden states of the wanted tokens, both in float32.

        wanted: indices of tokens; logits are made of the first `num_logits` of them, [num_logits, vocab]. The hidden
        states are those of the others after the final norm, [others, hidden].
        """
        _, begun = self._paged.targets(plan)
        for cache in self.caches.values():
            cache.zero(begun)
        if not self._observed.states and not self._observed.by_texts:
            whole = _Part(plan, np.arange(len(plan.token_ids)), 1)
            logits, hidden, _ = self._pass(whole, wanted, num_logits)
            return logits, hidden
        found = _Found(self._observed, wanted, num_logits, len(plan.token_ids))
        if not self._observed.states:
            for seq in range(len(plan.context_lens)):
                self._find(_whole(plan, seq), found, None)
        elif plan.states is None:
            raise InvariantError("a step of a model with recurrent layers names no states")
        else:
            self._continue(plan, plan.states, found)
        return found.logits, found.hidden

    def _continue(self, plan: StepPlan, states: StepStates, found: _Found) -> None:
        """Compute a step of a module with recurrent layers.

        transformers computes these for one text after the other, or for a token of each. So each sequence has passes of
        its own, up to a token whose state is saved, but for those that continue a state by one token: these share one.
        """
        counts, starts = np.diff(plan.query_starts), plan.query_starts[:-1].astype(np.int64)
        readers = np.flatnonzero(states.reads != NO_STATE).tolist()
        # All states are read before any is written, because a slot may be read by one sequence and written by another.
        earlier = self.slots.read(states.reads[readers].tolist())
        saves: dict[int, list[int]] = {}
        for token, slot in states.saves.tolist():
            saves.setdefault(token, []).append(slot)
        decoding = [row for row, seq in enumerate(readers) if counts[seq] == 1 and not self._observed.by_texts]
        for seq in sorted(set(range(len(counts))) - {readers[row] for row in decoding}):
            before = rows_of(earlier, [readers.index(seq)]) if seq in readers else None
            for part in self._parts(plan, seq, saves, begins=before is None):
                later = self._find(part, found, before)
                last = int(part.tokens[-1])
                ends = [int(states.writes[seq])] if last + 1 == plan.query_starts[seq + 1] else []
                for slot in (*saves.get(last, ()), *ends):
                    self.slots.write([slot], later)
                before = later
        if decoding:
            seqs = [readers[row] for row in decoding]
            later = self._find(_one_each(plan, seqs), found, rows_of(earlier, decoding))
            self.slots.write(states.writes[seqs].tolist(), later)
            for row, token in enumerate(starts[seqs].tolist()):
                for slot in saves.get(token, ()):
                    self.slots.write([slot], rows_of(later, [row]))

    def _parts(self, plan: StepPlan, seq: int, saved: Collection[int], *, begins: bool) -> Iterator[_Part]:
        """Yield a sequence's tokens in parts, which end at each saved token and at the last one."""
        begin, last = int(plan.query_starts[seq]), int(plan.query_starts[seq + 1])
        ends = sorted({*(token + 1 for token in saved if begin <= token < last), last})
        if self._by_tokens:
            ends = [*range(ends[0] if begins else begin + 1, last + 1)]
        for end in ends:
            tokens = np.arange(begin, end)
            starts, later = np.array([0, end - begin], np.int32), np.array([last - end], np.int32)
            yield _Part(_of_tokens(plan, tokens, [seq], starts, later), tokens, 1)
            begin = end

    def _find(self, part: _Part, found: _Found, earlier: StateValues | None) -> StateValues:
        """Compute a part, put what is wanted of it into `found`, and return the states after it."""
        chosen, rows = found.of(part)
        num_logits = int((chosen < len(found.logits)).sum())
        logits, hidden, later = self._pass(part, rows, num_logits, earlier)
        found.logits[chosen[:num_logits]] = logits
        found.hidden[chosen[num_logits:] - len(found.logits)] = hidden
        return later

    def _pass(
        self, part: _Part, wanted: NDArray[np.int64], num_logits: int, earlier: StateValues | None = None
    ) -> tuple[Tensor, Tensor, StateValues]:
        """Run the module over a part. Return logits and hidden states of its wanted tokens, and the states after it."""
        plan, rows, states = part.plan, torch.from_numpy(wanted), list[Tensor]()
        slots, _ = self._paged.targets(plan)
        step = _PackedPass(self._observed, self.caches, self._paged, self._paged.groups(plan), slots)

        def choose(_: nn.Module, given: tuple[Any, ...]) -> tuple[Tensor]:
            # A head over a large vocabulary takes longer than some layers, so it gets the wanted tokens alone.
            hidden = given[0].flatten(0, 1)[rows]
            states.append(hidden[num_logits:])
            return (hidden[None, :num_logits],)

        choosing = self._head.register_forward_pre_hook(choose)
        try:
            with running(step):
                ids, positions = (
                    torch.from_numpy(one).long().view(part.num_rows, -1) for one in (plan.token_ids, plan.positions)
                )
                cache = self._cache(plan, positions, slots, earlier)
                logits: Tensor = call(self._module, ids, positions, self._observed.form, cache).logits
        finally:
            choosing.remove()
        step.finish()
        return logits[0].float(), states[0].float(), cache.states.later()

    def _cache(
        self, plan: StepPlan, positions: Tensor, slots: Mapping[int, Tensor], earlier: StateValues | None
    ) -> PackedCache:
        if not self._observed.by_texts:
            return PackedCache(positions, counts_each=self._observed.form.counts_each, earlier=earlier)
        blocks = torch.from_numpy(plan.block_tables[0].astype(np.int64))
        heads = [layer.num_kv_heads for layer in self._observed.layers]
        texts = {
            number: _TextLayer(self.caches[at], blocks, slots[heads[at]])
            for at, number in enumerate(self._observed.numbers)
        }
        return TextCache(positions, texts, earlier)


@dataclass(frozen=True, slots=True)
class _Part:
    """Tokens of a step that one pass computes: in one row, or one token in each row."""

    plan: StepPlan
    """The part as a step of its own."""
    tokens: NDArray[np.int64]
    """Its tokens as indices into the step's, ascending."""
    num_rows: int


def _one_each(plan: StepPlan, seqs: Sequence[int]) -> _Part:
    """Return the tokens of sequences that have one each."""
    tokens = plan.query_starts[:-1][seqs].astype(np.int64)
    starts = np.arange(len(seqs) + 1, dtype=np.int32)
    return _Part(_of_tokens(plan, tokens, seqs, starts, np.zeros(len(seqs), np.int32)), tokens, len(seqs))


def _of_tokens(
    plan: StepPlan,
    tokens: NDArray[np.int64],
    seqs: Sequence[int],
    query_starts: NDArray[np.int32],
    later: NDArray[np.int32],
) -> StepPlan:
    """Return some tokens of a step as a step. `later` is the number of tokens that each sequence has after them."""
    return replace(
        plan,
        token_ids=plan.token_ids[tokens],
        positions=plan.positions[tokens],
        query_starts=query_starts,
        context_lens=plan.context_lens[seqs] - later,
        block_tables=plan.block_tables[seqs],
    )


def _whole(plan: StepPlan, seq: int) -> _Part:
    """Return all tokens of a sequence."""
    tokens = np.arange(plan.query_starts[seq], plan.query_starts[seq + 1], dtype=np.int64)
    starts = np.array([0, len(tokens)], np.int32)
    return _Part(_of_tokens(plan, tokens, [seq], starts, np.zeros(1, np.int32)), tokens, 1)


@dataclass(frozen=True, slots=True)
class _TextLayer:
    """The keys and values of one text in one layer."""

    cache: KvCache
    blocks: Tensor
    """The text's blocks, padded."""
    slots: Tensor
    """Of the pass's tokens (`KvCache.store`)."""

    def extended(self, k: Tensor, v: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Store new keys and values; return those of the text's first `length` tokens.

        All are [1, heads, tokens, channels].
        """
        kept, size = self.cache.k.dtype, self.cache.k.shape[2]
        self.cache.store(_by_tokens(k).to(kept), _by_tokens(v).to(kept), self.slots)
        blocks = self.blocks[: -(-length // size)]
        keys, values = (one[:, blocks].flatten(1, 2)[None, :, :length] for one in (self.cache.k, self.cache.v))
        return keys.to(k.dtype), values.to(v.dtype)


class _Found:
    """The logits and hidden states of a step that is computed in parts, in float32."""

    def __init__(self, observed: Observed, wanted: NDArray[np.int64], num_logits: int, num_tokens: int) -> None:
        self.logits = torch.empty(num_logits, observed.vocab_size)
        self.hidden = torch.empty(len(wanted) - num_logits, observed.hidden_size)
        self._wanted = wanted
        self._places = np.empty(num_tokens, np.int64)

    def of(self, part: _Part) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return which of the wanted tokens a part has, and their places in it."""
        self._places.fill(-1)
        self._places[part.tokens] = np.arange(len(part.tokens))
        places = self._places[self._wanted]
        chosen = np.flatnonzero(places >= 0)
        return chosen, places[chosen]


class _PackedPass:
    """Computes the attention calls of one pass, in the order in which they were observed."""

    def __init__(
        self,
        observed: Observed,
        caches: Mapping[int, KvCache],
        paged: PagedAttention,
        groups: list[AttentionGroup],
        slots: Mapping[int, Tensor],
    ) -> None:
        self._observed = observed
        self._caches = caches
        self._paged = paged
        self._groups = groups
        self._slots = slots
        self._next = 0

    def mask(self, sees: Callable[..., Any], num_tokens: int, device: torch.device) -> Tensor:
        """Return a tensor of the usual shape. What it stands for is known of each layer."""
        return torch.zeros(1, 1, 1, 1, device=device).expand(1, 1, num_tokens, num_tokens)

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, settings: Mapping[str, Any]
    ) -> Tensor:
        """Store the keys and values, and compute the next attention."""
        at = self._next
        self._next += 1
        layer = self._observed.layers[at]
        cache = self._caches[layer.owner]
        kept = cache.k.dtype
        if layer.owner == at:
            cache.store(_by_tokens(k).to(kept), _by_tokens(v).to(kept), self._slots[layer.num_kv_heads])
        queries = _by_tokens(q).to(kept).contiguous()
        out = self._paged.attend(queries, cache, self._groups, layer, settings.get("s_aux"))
        return out.view(len(q), -1, *out.shape[1:]).to(q.dtype).contiguous()

    def finish(self) -> None:
        """Raise InvariantError if the module has called other attentions than before."""
        if not self._observed.by_texts and self._next != len(self._observed.layers):
            raise InvariantError(f"{self._next} attention calls in a step, {len(self._observed.layers)} were observed")


def _by_tokens(values: Tensor) -> Tensor:
    """Return [rows, heads, tokens, channels] as [rows * tokens, heads, channels]."""
    return values.transpose(1, 2).flatten(0, 1)
