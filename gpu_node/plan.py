"""Which shapes of ranks and replicas a host could run a model in, and which of them fits."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.gpu_node.engine.served_model import Devices as Devices
from penstock.gpu_node.engine.served_model import ModelPlan as ModelPlan
from penstock.gpu_node.engine.served_model import ShapeFit as ShapeFit
from penstock.gpu_node.engine.served_model import plan
from penstock.gpu_node.settings import NodeSettings, engine_config

FEW_DEVICES = 4
"""Up to so many, shapes that leave a device idle are listed too."""
MAX_CPU_RANKS = 8


def plan_of(
    settings: NodeSettings, devices: Devices, *, tensor: int | None = None, pipeline: int | None = None
) -> ModelPlan:
    """Return the plan of a node's model on devices, for all shapes or for the named sizes. Raises ConfigError."""
    shapes = list(_gpu_shapes(devices.count) if devices.kind == "gpu" else _cpu_shapes(devices.count))
    shapes = [one for one in shapes if tensor in (None, one[0]) and pipeline in (None, one[1])]
    if not shapes:
        one = tensor or 1, pipeline or 1
        shapes = [(*one, max(1, devices.count // max(1, one[0] * one[1])))]
    return plan(engine_config(settings), devices, shapes)


def _gpu_shapes(count: int) -> Iterator[tuple[int, int, int]]:
    """Yield ranks, stages and replicas, the fewest ranks first. A GPU has no stages."""
    for ranks in range(1, count + 1):
        if count % ranks == 0 or count <= FEW_DEVICES:
            yield ranks, 1, count // ranks


def _cpu_shapes(count: int) -> Iterator[tuple[int, int, int]]:
    """Yield one node with more and more ranks, then more and more nodes of one rank each."""
    most = min(count, MAX_CPU_RANKS)
    yield from ((ranks, 1, 1) for ranks in range(1, most + 1))
    yield from ((1, 1, replicas) for replicas in range(2, most + 1))
