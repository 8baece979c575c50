"""The attention function and the cache through which transformers' modules reach our KV blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.transformers_runner.states import PassStates, StateValues

IMPLEMENTATION = "penstock_paged"
"""The name of our attention among those of transformers."""
OWN_ATTENTION = "eager"
"""The name of each class's own attention."""
NO_INTERFACE = "it has no attention that goes through transformers' AttentionInterface"
NO_CACHE = "it keeps neither keys and values nor states in a cache"


class UnsupportedModuleError(ConfigError):
    """A module computes something that this runner does not support; the message says what."""


class Pass(Protocol):
    """One pass of a module over tokens of a step."""

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, settings: Mapping[str, Any]
    ) -> Tensor:
        """Compute the next attention.

        q, k, v: [rows, heads, tokens, channels]; returns [rows, tokens, heads, channels].
        """

    def mask(self, sees: Callable[..., Any], num_tokens: int, device: torch.device) -> Tensor:
        """Return what stands for a mask. `sees` is transformers' function of batch, head, query and key position."""


_running: ContextVar[Pass] = ContextVar("penstock_pass")
"""The pass that this thread computes. transformers calls attention functions with nothing of ours."""


@contextmanager
def running(one: Pass) -> Iterator[None]:
    """Let modules that run in the block compute attention by this pass."""
    token = _running.set(one)
    try:
        yield
    finally:
        _running.reset(token)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings: Any
) -> tuple[Tensor, None]:
    return _running.get().attend(module, query, key, value, attention_mask, settings), None


def _mask(*, q_length: int, mask_function: Callable[..., Any], device: torch.device, **_: Any) -> Tensor:
    return _running.get().mask(mask_function, q_length, device)


def register() -> None:
    """Make our attention known to transformers."""
    AttentionInterface.register(IMPLEMENTATION, _attention)
    AttentionMaskInterface.register(IMPLEMENTATION, _mask)


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a module is told the positions of packed tokens, beside `position_ids`."""

    counts_each: bool
    """Whether it gets a number of earlier tokens for each token (`PackedCache`), else always 0."""
    has_mask: bool
    """Whether it gets a mask of ones for the step's tokens. Some modules make one for earlier tokens otherwise."""


CALL_FORMS = (CallForm(True, False), CallForm(True, True), CallForm(False, False), CallForm(False, True))
"""The best form first."""
CALL_FORMS_OF_TEXTS = CALL_FORMS[2:]
"""Of modules that compute one text after the other: a mask stands for the text's tokens up to the last one."""


class _NoLayers(list[Any]):
    """Stands for the layers of a cache that has none."""

    def __getitem__(self, index: object) -> Any:
        raise UnsupportedModuleError("a layer keeps something of its own in the cache")


class PackedCache(Cache):
    """Tells a module the positions of the tokens of a pass, and has the states of its recurrent layers.

    It keeps no keys and values, because these are stored at the attention. A module that counts positions from the
    number of earlier tokens gets a number for each token: the tokens of a step belong to several sequences.
    """

    def __init__(
        self, positions: Tensor, *, counts_each: bool, length: int = 0, earlier: StateValues | None = None
    ) -> None:
        """positions: [rows, tokens]; counts_each: whether the module can take a number for each token.

        length: the keys that masks stand for, by default the pass's own tokens; earlier: the states before the pass, of
        each row.
        """
        self._length = length or positions.shape[1]
        self.mask_length = positions.shape[1]
        """Of the mask of ones that some modules get."""
        super().__init__(layers=_NoLayers())
        earlier_tokens = positions - torch.arange(positions.shape[1], device=positions.device)
        self._earlier = (earlier_tokens[0] if len(positions) == 1 else earlier_tokens) if counts_each else 0
        self.states = PassStates(earlier)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the new keys and values as they are."""
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """Return the number that makes a token's index in the step its position, [tokens]; else 0."""
        return self._earlier

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the number of keys of a mask, and that of the first one."""
        return self._length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return 0: masks stand for the step's own tokens."""
        return 0

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return whether the pass continues states; the same for all layers."""
        return self.states.continues

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the last inputs of a convolution; None where the pass begins."""
        layer = self.states.layer(layer_idx)
        return layer.conv_states[state_idx] if layer.has_previous_state[state_idx] else None

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Keep the last inputs of a convolution; return them with those that were kept before."""
        return self.states.layer(layer_idx).update_conv_state(conv_states, state_idx, **kwargs)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the state of a recurrence; None where the pass begins."""
        layer = self.states.layer(layer_idx)
        return layer.recurrent_states[state_idx] if layer.has_previous_state[state_idx] else None

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """Keep the state of a recurrence."""
        return self.states.layer(layer_idx).update_recurrent_state(recurrent_states, state_idx, **kwargs)

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return False: no token is taken back."""
        return False

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """Refuse layers that choose the tokens which they attend to."""
        raise UnsupportedModuleError("a layer chooses the tokens that it attends to by an indexer (sparse attention)")


class TextCache(PackedCache):
    """The cache of a module with an attention of its own, which computes one text in a pass."""

    def __init__(self, positions: Tensor, layers: Mapping[int, TextLayer], earlier: StateValues | None = None) -> None:
        """positions: [1, tokens]; layers: by the module's own numbers."""
        super().__init__(positions, counts_each=False, length=int(positions[0, -1]) + 1, earlier=earlier)
        self.mask_length = self._length
        self._earlier = self._length - positions.shape[1]
        self._layers_of_text = layers

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store the new keys and values; return those of all tokens of the text up to the last one.

        key_states, value_states: [1, heads, tokens, channels]; returns [1, heads, text, channels].
        """
        return self._layers_of_text[layer_idx].extended(key_states, value_states, self._length)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return the number of tokens before the pass."""
        return int(self._earlier)


class TextLayer(Protocol):
    """The keys and values of one text in one layer."""

    def extended(self, k: Tensor, v: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Store new keys and values; return those of the text's first `length` tokens.

        All are [1, heads, tokens, channels].
        """
