"""An attention backend of plain torch operations, one sequence after another: slow, and easy to believe."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from penstock.gpu_node.model.gpu.decoder import AttentionRows
from penstock.kernels.arguments import PagedCache


class SdpaAttention:
    """torch's scaled dot product attention over gathered blocks. It reads lengths on the host, so no graph can hold it.

    It reads the GPU's blocks only, not those in host memory.
    """

    def attend(
        self,
        out: Tensor,
        q: Tensor,
        cache: PagedCache,
        starts: Tensor,
        contexts: Tensor,
        tables: Tensor,
        rows: AttentionRows,
        *,
        scale: float,
        window: int | None,
        biases: Tensor | None,
        cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        """Implement `AttentionBackend.attend`."""
        bounds, group = starts.tolist(), q.shape[1] // cache.k.shape[0]
        for seq, context in enumerate(contexts.tolist()):
            if not context:
                continue
            span = slice(bounds[seq], bounds[seq + 1])
            at = torch.arange(context, device=q.device)
            positions = at[context - (span.stop - span.start) :]
            slots = tables[seq].long()[at // cache.block_size] * cache.block_size + at % cache.block_size
            k, v = (values.repeat_interleave(group, dim=0) for values in _read(cache, slots))
            seen = at[None, :] <= positions[:, None]
            if window is not None:
                seen &= at[None, :] > positions[:, None] - window
            added = torch.zeros(seen.shape, device=q.device).masked_fill(~seen, float("-inf"))
            if biases is not None:
                added = added + biases[:, None, :context]
            queries = q[span].float().transpose(0, 1)
            if cap is None and sinks is None:
                attended = functional.scaled_dot_product_attention(queries, k, v, attn_mask=added, scale=scale)
            else:
                scores = queries @ k.transpose(1, 2) * scale
                scores = (scores if cap is None else cap * torch.tanh(scores / cap)) + added
                if sinks is not None:
                    scores = torch.cat((scores, sinks.view(-1, 1, 1).expand(-1, len(positions), 1)), dim=-1)
                attended = torch.softmax(scores, dim=-1)[..., :context] @ v
            out[span] = attended.transpose(0, 1).to(out.dtype)


def _read(cache: PagedCache, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values of slots, each [num_kv_heads, len(slots), head_dim] in float32."""
    block, offset = slots // cache.block_size, slots % cache.block_size
    k, v = (values[:, block, offset].float() for values in (cache.k, cache.v))
    if cache.k_scales is not None and cache.v_scales is not None:
        k, v = (x * s[:, block, offset, None] for x, s in ((k, cache.k_scales), (v, cache.v_scales)))
    return k, v
