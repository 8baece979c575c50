"""What a module's attention needs, seen in a pass over a few tokens: heads, sizes, windows, and layers that share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.contract.errors import InvariantError
from penstock.gpu_node.model.transformers_runner.attention import (
    CALL_FORMS,
    CALL_FORMS_OF_TEXTS,
    IMPLEMENTATION,
    NO_CACHE,
    NO_INTERFACE,
    CallForm,
    PackedCache,
    TextCache,
    UnsupportedModuleError,
    running,
)
from penstock.gpu_node.model.transformers_runner.states import StateShape

NUM_TOKENS = 8
"""Of the pass that is observed."""
_PROBED = 1 << 12
"""Positions at which a mask is compared with what was found of it, spread over all."""
_KNOWN_SETTINGS = frozenset(("dropout", "scaling", "sliding_window", "softcap", "s_aux", "is_causal")) | {
    *(
        "position_ids",
        "use_cache",
        "cache_position",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
    ),
    *(
        "return_dict",
        "logits_to_keep",
        "training",
        "target_dtype",
        "layer_idx",
        "past_key_values",
        "position_embeddings",
    ),
}
"""Arguments of an attention call that are used here, or change nothing of it."""


@dataclass(frozen=True, slots=True)
class ObservedLayer:
    """An attention call of a pass, in the order of calls."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    score_cap: float | None
    window: int | None
    chunk: int | None
    owner: int
    """The call whose keys and values this one reads; its own index if it stores new ones."""
    has_position_biases: bool = False

    @property
    def channels(self) -> int:
        """Channels of a token's key and value in all heads."""
        return self.num_kv_heads * (self.head_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class Observed:
    """What a pass of a module has shown."""

    layers: tuple[ObservedLayer, ...]
    hidden_size: int
    """Of the head's input."""
    vocab_size: int
    form: CallForm
    states: tuple[StateShape, ...] = ()
    """Those that recurrent layers keep of a sequence."""
    by_texts: bool = False
    """Whether the module has an attention of its own, so that a pass computes one text."""
    numbers: tuple[int, ...] = ()
    """With `by_texts`, the module's own number of each layer."""

    def owns(self, at: int) -> bool:
        """Return whether an attention call stores keys and values."""
        return self.by_texts or self.layers[at].owner == at

    @property
    def channels(self) -> int:
        """Channels of a token's keys and values in all layers that store them."""
        return sum(layer.channels for at, layer in enumerate(self.layers) if self.owns(at))

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of a sequence in all layers."""
        return sum(one.num_bytes for one in self.states)


def observe(module: nn.Module, max_model_len: int, device: torch.device) -> Observed:
    """Run a module over a few tokens. It may be on the meta device, where nothing is computed.

    Raises UnsupportedModuleError for what the runner does not support.
    """
    by_texts = module.config._attn_implementation != IMPLEMENTATION  # type: ignore[union-attr]
    problem: Exception | None = None
    for form in CALL_FORMS_OF_TEXTS if by_texts else CALL_FORMS:
        try:
            return _observed(module, max_model_len, device, form, by_texts=by_texts)
        except (TypeError, RuntimeError) as error:
            problem = problem or error
    raise problem or InvariantError("there is no form of a call")


def _observed(
    module: nn.Module, max_model_len: int, device: torch.device, form: CallForm, *, by_texts: bool
) -> Observed:
    watched, seen = _ObservingPass(max_model_len), list[Tensor]()
    watching = head_of(module).register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    positions = torch.arange(NUM_TOKENS, device=device)[None]
    stored = _StoredLayers()
    if by_texts:
        cache: PackedCache = TextCache(torch.arange(NUM_TOKENS)[None], stored)
    else:
        cache = PackedCache(positions, counts_each=form.counts_each, length=max_model_len)
    try:
        with running(watched), torch.inference_mode():
            logits = call(module, positions, positions, form, cache).logits
    finally:
        watching.remove()
    states = tuple(cache.states.later())
    layers = [*(watched.layers or map(_layer_of_text, stored.values()))]
    if not layers and not states:
        raise UnsupportedModuleError(NO_CACHE if by_texts else NO_INTERFACE)
    if len(seen) != 1 or seen[0].shape[:2] != (1, NUM_TOKENS) or logits.shape[:2] != (1, NUM_TOKENS):
        raise UnsupportedModuleError("its head is not computed once from the hidden states of all tokens")
    sizes = seen[0].shape[-1], logits.shape[-1]
    return Observed(tuple(layers), *sizes, form, states, by_texts, tuple(stored) if by_texts else ())


class _StoredLayer:
    """Records what a layer stores."""

    def __init__(self) -> None:
        self.shapes: list[tuple[torch.Size, torch.Size]] = []

    def extended(self, k: Tensor, v: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return the new keys and values: there are no others."""
        self.shapes.append((k.shape, v.shape))
        return k, v


class _StoredLayers(dict[int, _StoredLayer]):
    """By the module's own number of the layer."""

    def __missing__(self, number: int) -> _StoredLayer:
        self[number] = _StoredLayer()
        return self[number]


def _layer_of_text(stored: _StoredLayer) -> ObservedLayer:
    (keys, values), *more = stored.shapes
    if more or len(keys) != 4 or keys[:3] != values[:3] or keys[0] != 1 or keys[2] != NUM_TOKENS:
        what = f"keys {list(keys)} and values {list(values)}, {len(more) + 1} times"
        raise UnsupportedModuleError(f"a layer stores {what}, for {NUM_TOKENS} tokens")
    return ObservedLayer(
        num_heads=keys[1],
        num_kv_heads=keys[1],
        head_dim=keys[3],
        value_dim=values[3],
        scale=1.0,
        score_cap=None,
        window=None,
        chunk=None,
        owner=-1,
    )


def call(module: nn.Module, token_ids: Tensor, positions: Tensor, form: CallForm, cache: PackedCache) -> Any:
    """Run a module over tokens and return its output. token_ids, positions: [rows, tokens]."""
    taken = inspect.signature(module.forward).parameters
    # Modules without attention call it otherwise.
    its_name = "past_key_values" if "past_key_values" in taken or "cache_params" not in taken else "cache_params"
    given: dict[str, Any] = {its_name: cache, "use_cache": True}
    if form.has_mask:
        shape = len(token_ids), cache.mask_length
        given["attention_mask"] = torch.ones(shape, dtype=torch.long, device=token_ids.device)
    if "position_ids" in taken:
        given["position_ids"] = positions
    if "logits_to_keep" in taken:
        # All of them, because a hook chooses later. Given a number, Gemma 4 computes its last layers for fewer tokens.
        given["logits_to_keep"] = torch.arange(token_ids.shape[1], device=token_ids.device)
    return module(input_ids=token_ids, **given)


def head_of(module: Any) -> nn.Module:
    """Return the matrix that makes logits. Raises UnsupportedModuleError."""
    head: nn.Module | None = module.get_output_embeddings()
    if head is None or not isinstance(getattr(head, "weight", None), Tensor):
        raise UnsupportedModuleError("it has no single head that makes logits")
    return head


class _ObservingPass:
    """Records each attention call and computes nothing."""

    def __init__(self, max_model_len: int) -> None:
        self.layers: list[ObservedLayer] = []
        self._max_model_len = max_model_len
        self._stored: list[tuple[Tensor, Tensor]] = []
        self._masks: list[tuple[Tensor, Callable[..., Any]]] = []

    def mask(self, sees: Callable[..., Any], num_tokens: int, device: torch.device) -> Tensor:
        """Keep the function of a mask, in case that an attention gets it."""
        tag = torch.zeros(1, 1, 1, 1, device=device).expand(1, 1, num_tokens, num_tokens)
        self._masks.append((tag, sees))
        return tag

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, settings: Mapping[str, Any]
    ) -> Tensor:
        """Record a call; return zeros."""
        window, chunk = self._seen_by(module, mask, settings)
        for name, value in settings.items():
            if name not in _KNOWN_SETTINGS and value is not None and value is not False:
                raise UnsupportedModuleError(f"its attention is called with {name}, which is not supported")
        num_heads, num_kv_heads, head_dim = q.shape[1], k.shape[1], q.shape[3]
        if q.shape[0] != 1 or q.shape[2] != NUM_TOKENS or k.shape[2] != NUM_TOKENS or v.shape[2] != NUM_TOKENS:
            raise UnsupportedModuleError("a layer attends to other things than the tokens of its sequence")
        scale, cap = settings.get("scaling"), settings.get("softcap")
        if not isinstance(scale, int | float | None) or not isinstance(cap, int | float | None):
            raise UnsupportedModuleError("the scale of its scores is computed")
        if num_heads % num_kv_heads or k.shape[3] != head_dim or v.shape[1] != num_kv_heads:
            raise UnsupportedModuleError(f"queries {list(q.shape)}, keys {list(k.shape)}, values {list(v.shape)}")
        at = len(self.layers)
        owner = next((i for i, stored in enumerate(self._stored) if stored[0] is k and stored[1] is v), at)
        self._stored.append((k, v))
        self.layers.append(
            ObservedLayer(
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                value_dim=v.shape[3],
                scale=head_dim**-0.5 if scale is None else float(scale),
                score_cap=None if cap is None else float(cap),
                window=window,
                chunk=chunk,
                owner=owner,
            )
        )
        return v.new_zeros(1, NUM_TOKENS, num_heads, v.shape[3], dtype=q.dtype)

    def _seen_by(
        self, module: nn.Module, mask: Tensor | None, settings: Mapping[str, Any]
    ) -> tuple[int | None, int | None]:
        """Return the window and the chunk of a call's mask."""
        if mask is None:
            is_causal = settings.get("is_causal")
            if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
                raise UnsupportedModuleError("a token attends to later ones")
            return None, None
        found = next((sees for tag, sees in self._masks if tag is mask), None)
        if found is None:
            raise UnsupportedModuleError("it makes an attention mask of its own")
        return window_and_chunk(found, self._max_model_len)


def window_and_chunk(sees: Callable[..., Any], length: int) -> tuple[int | None, int | None]:
    """Return the window or the chunk size of a causal mask for texts of some length, or None for each.

    sees: a function of batch, head, query and key position, which may be tensors. Raises UnsupportedModuleError for
    other masks.
    """
    first, at = torch.zeros((), dtype=torch.long), torch.arange(length)

    def seen(queries: Tensor, keys: Tensor) -> Tensor:
        return torch.as_tensor(sees(first, first, queries, keys)).expand((queries + keys).shape)

    hidden = (~seen(at, first)).nonzero()
    if not len(hidden):
        found: tuple[int | None, int | None] = None, None
    else:
        # The first query that does not see the first key: the end of a window, or the start of the second chunk.
        end = int(hidden[0])
        found = (end, None) if bool(seen(torch.tensor(end), torch.tensor(1))) else (None, end)
    window, chunk = found
    queries = at[:: max(1, length // 64)][:, None]
    keys = torch.cat((at[:: max(1, length // _PROBED)], torch.tensor([value for value in found if value is not None])))
    keys = torch.cat((keys, keys - 1, keys + 1)).clamp(0, length - 1)[None].long()
    expected = keys <= queries
    if window is not None:
        expected &= keys > queries - window
    if chunk is not None:
        expected &= keys // chunk == queries // chunk
    if not torch.equal(seen(queries, keys), expected):
        raise UnsupportedModuleError("its attention mask is neither causal nor a window nor chunks")
    return found
