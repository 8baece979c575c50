"""Which thread is on which NUMA node, and weights in the memory of the node whose threads compute them.

A page belongs to the node of the thread that writes it first. A shared mapping of a file lies where it was read.
So with several nodes each matrix is copied into private memory: a pinned thread of each node writes the panels that
this node's threads compute. A rank copies only the panels that it computes. No call moves pages or sets a policy
(`mbind`), which containers may refuse. With one node nothing is copied.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.gpu_node.model.native.packing import panel_bytes
from penstock.kernels.cpu.probe import SYSTEM, cores_of, numa_nodes
from penstock.kernels.cpu.structs import PANEL, Run

Bytes: TypeAlias = NDArray[np.uint8]
CopyOn: TypeAlias = Callable[[Sequence[int], Bytes, Bytes], None]
"""Copies bytes to a target, by a thread that stays on the given CPUs."""


def copy_on(cpus: Sequence[int], target: Bytes, source: Bytes) -> None:
    """Copy bytes by the calling thread, which stays on these CPUs from then on."""
    with suppress(OSError):
        os.sched_setaffinity(0, cpus)
    np.copyto(target, source)


@dataclass(frozen=True, slots=True)
class NumaPlacement:
    """The cores of a team's threads, in the order of the threads, and their NUMA nodes."""

    cores: tuple[int, ...]
    nodes: tuple[int, ...]
    is_part: bool = False
    """Whether the team is that of a rank, and the threads of all ranks are on several nodes."""

    @classmethod
    def of(cls, cores: Sequence[int], system: Path = SYSTEM) -> NumaPlacement:
        """Order the cores of a team by their nodes. With one node they keep their order."""
        by_node = numa_nodes(cores_of(cores, system))
        if len(by_node) < 2:
            return cls(tuple(cores), (0,) * len(cores))
        ordered = [(cpu, node) for node, cpus in by_node.items() for cpu in cpus]
        return cls(tuple(cpu for cpu, _ in ordered), tuple(node for _, node in ordered))

    def part(self, threads: range) -> NumaPlacement:
        """Return the placement of a rank, which has some of the threads. Threads without cores stay without."""
        if len(self.cores) <= threads[-1]:
            return NumaPlacement((), ())
        cores, nodes = (tuple(given[thread] for thread in threads) for given in (self.cores, self.nodes))
        return NumaPlacement(cores, nodes, is_part=self.is_spread)

    @property
    def is_spread(self) -> bool:
        """Whether the threads are on several nodes."""
        return len(set(self.nodes)) > 1

    @property
    def copies(self) -> bool:
        """Whether weights have to be copied to lie near their threads."""
        return self.is_spread or self.is_part

    def parts(self, num_items: int) -> Iterator[tuple[tuple[int, ...], range]]:
        """Yield each node's CPUs, and the items of a loop that its threads compute (`Worker::for_each`)."""
        size = len(self.cores)
        for node in dict.fromkeys(self.nodes):
            at = [thread for thread in range(size) if self.nodes[thread] == node]
            items = range(num_items * at[0] // size, num_items * (at[-1] + 1) // size)
            yield tuple(self.cores[thread] for thread in at), items

    def placed(
        self,
        runs: Sequence[Run],
        columns: int,
        packed: Bytes,
        panels: Sequence[int] | None = None,
        copy: CopyOn = copy_on,
    ) -> Bytes:
        """Return a copy of a packed matrix whose panels lie near their threads; with one node the matrix itself.

        panels: those that the threads compute, in the order of their loop. The others are not copied: their pages are
        never written, and take no memory.
        """
        if not self.copies:
            return packed
        starts = panel_starts(runs, columns)
        computed = range(len(starts) - 1) if panels is None else panels
        memory = mmap.mmap(-1, max(1, packed.nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        target = np.frombuffer(memory, np.uint8)[: packed.nbytes]
        parts = list(self.parts(len(computed)))
        with ThreadPoolExecutor(len(parts), "penstock-place") as pool:
            copies = [
                pool.submit(copy, cpus, target[begin:end], packed[begin:end])
                for cpus, items in parts
                for begin, end in bytes_of(computed[items.start : items.stop], starts)
            ]
            for done in copies:
                done.result()
        return target


def bytes_of(panels: Sequence[int], starts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield where consecutive panels begin and end; starts: those of all panels, as `panel_starts` returns them."""
    first = 0
    for at in range(1, len(panels) + 1):
        if at == len(panels) or panels[at] != panels[at - 1] + 1:
            yield starts[panels[first]], starts[panels[at - 1] + 1]
            first = at


def panel_starts(runs: Sequence[Run], columns: int) -> list[int]:
    """Return the offset of each panel of a packed matrix, then its size."""
    starts, padded = [0], -(-columns // PANEL) * PANEL
    for weights, rows in runs:
        size = panel_bytes(weights, padded)
        starts += [starts[-1] + size * (panel + 1) for panel in range(-(-rows // PANEL))]
    return starts
