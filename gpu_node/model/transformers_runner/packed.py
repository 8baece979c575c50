"""One pass of a module over a step's packed tokens, with attention over our KV blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from penstock.contract.errors import InvariantError
from penstock.gpu_node.model.protocol import StepPlan
from penstock.gpu_node.model.torch_cpu.attention import AttentionGroup, KvCache, PagedAttention
from penstock.gpu_node.model.transformers_runner.attention import running
from penstock.gpu_node.model.transformers_runner.observed import Observed, call, head_of


class PackedModule:
    """A module, and the KV caches of its layers. Not thread-safe."""

    def __init__(
        self, module: nn.Module, observed: Observed, num_blocks: int, block_size: int, dtype: torch.dtype
    ) -> None:
        self._module = module
        self._head = head_of(module)
        self._observed = observed
        self._paged = PagedAttention(observed.layers, num_blocks, block_size, dtype)
        self.caches = {
            at: KvCache(layer, num_blocks, block_size, dtype)
            for at, layer in enumerate(observed.layers)
            if observed.owns(at)
        }

    def compute(self, plan: StepPlan, wanted: NDArray[np.int64], num_logits: int) -> tuple[Tensor, Tensor]:
        """Run a step. Return the logits and hidden states of the wanted tokens, both in float32.

        wanted: indices of tokens; logits are made of the first `num_logits` of them, [num_logits, vocab]. The hidden
        states are those of the others after the final norm, [others, hidden].
        """
        slots, begun = self._paged.targets(plan)
        for cache in self.caches.values():
            cache.zero(begun)
        step = _PackedPass(self._observed, self.caches, self._paged, self._paged.groups(plan), slots)
        rows, states = torch.from_numpy(wanted), list[Tensor]()

        def choose(_: nn.Module, given: tuple[Any, ...]) -> tuple[Tensor]:
            # A head over a large vocabulary takes longer than some layers, so it gets the wanted tokens alone.
            hidden = given[0][:, rows]
            states.append(hidden[0, num_logits:])
            return (hidden[:, :num_logits],)

        choosing = self._head.register_forward_pre_hook(choose)
        try:
            with running(step):
                ids, positions = (torch.from_numpy(one).long() for one in (plan.token_ids, plan.positions))
                logits: Tensor = call(self._module, ids, positions, self._observed.form).logits
        finally:
            choosing.remove()
        step.finish()
        return logits[0].float(), states[0].float()


class _PackedPass:
    """Computes the attention calls of one step, in the order in which they were observed."""

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
        if layer.owner == at:
            kept = cache.k.dtype
            cache.store(k[0].transpose(0, 1).to(kept), v[0].transpose(0, 1).to(kept), self._slots[layer.num_kv_heads])
        queries = q[0].transpose(0, 1).to(cache.k.dtype).contiguous()
        out = self._paged.attend(queries, cache, self._groups, layer, settings.get("s_aux"))
        return out[None].to(q.dtype).contiguous()

    def finish(self) -> None:
        """Raise InvariantError if the module has called other attentions than before."""
        if self._next != len(self._observed.layers):
            raise InvariantError(f"{self._next} attention calls in a step, {len(self._observed.layers)} were observed")
