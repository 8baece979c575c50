"""Which layers of a model see only a window of the tokens before each one."""

from __future__ import annotations

from penstock.gpu_node.model.architecture.spec import Attention, ModelSpec


def windowed_layers(spec: ModelSpec) -> frozenset[int]:
    """Return the layers whose keys and values no token reads from behind a window, with those that read another's.

    There are none if all layers with attention have windows, or if none has.
    """
    readers: dict[int, list[tuple[int, Attention]]] = {}
    for at, layer in enumerate(spec.layers):
        if (attention := layer.attention) is not None:
            readers.setdefault(at if attention.source is None else attention.source, []).append((at, attention))
    windowed = [group for group in readers.values() if all(attention.window is not None for _, attention in group)]
    return frozenset(at for group in windowed for at, _ in group) if len(windowed) < len(readers) else frozenset()


def largest_window(spec: ModelSpec) -> int:
    """Return the largest window of the windowed layers; 0 if there are none."""
    attentions = (spec.layers[at].attention for at in windowed_layers(spec))
    return max((attention.window or 0 for attention in attentions if attention is not None), default=0)
