"""How many states of recurrent layers a runner has memory for, and how many sequences they allow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.options import RunnerOptions
from penstock.kernels.cpu.probe import available_bytes

STATE_SHARE = 0.25
"""Share of the free memory that states may take by default."""
SLOTS_OF_SEQUENCE = 2
"""State slots for each sequence: a step may read one and write another. Where it does not, they hold snapshots."""
_GIB, _MIB = 1 << 30, 1 << 20


@dataclass(frozen=True, slots=True)
class StateFit:
    """The state slots of a runner."""

    slot_bytes: int
    """Of one slot; 0 for a model without recurrent layers."""
    num_slots: int
    max_num_seqs: int
    """Sequences in a step: as configured, or fewer."""

    @property
    def num_bytes(self) -> int:
        """Of all slots."""
        return self.num_slots * self.slot_bytes


def fit_states(
    options: RunnerOptions, slot_bytes: int, block_bytes: Callable[[], int], *, free_on_gpu: int | None = None
) -> StateFit:
    """Return how many states of `slot_bytes` each fit. `block_bytes` returns the size of a KV block, for an error.

    free_on_gpu: what weights leave of the share of a GPU (`gpu_memory_utilization`); None: the CPU computes.

    Raises ConfigError if the memory does not hold the states of one sequence.
    """
    if not slot_bytes:
        return StateFit(0, 0, options.max_num_seqs)
    wanted, memory, free_bytes = SLOTS_OF_SEQUENCE * options.max_num_seqs, "free memory", available_bytes()
    if free_on_gpu is not None:
        memory, free_bytes = "GPU memory that weights leave", max(1, free_on_gpu)
    budget = f"state_cache_gib {options.state_cache_gib}"
    if options.state_slots:
        budget, num_slots = f"state_slots {options.state_slots}", options.state_slots
    elif options.state_cache_gib is not None:
        num_slots = int(options.state_cache_gib * _GIB) // slot_bytes
    elif free_bytes:
        budget = f"{STATE_SHARE:.0%} of the {memory}, {free_bytes * STATE_SHARE / _GIB:.4g} GiB,"
        num_slots = min(wanted, int(free_bytes * STATE_SHARE) // slot_bytes)
    else:
        num_slots = wanted
    num_seqs = min(options.max_num_seqs, num_slots // SLOTS_OF_SEQUENCE)
    if num_seqs < 1:
        raise ConfigError(
            f"{budget} holds {num_slots} states of recurrent layers, but a sequence needs {SLOTS_OF_SEQUENCE}. A state "
            f"takes {slot_bytes / _MIB:,.4g} MiB, a KV block of {options.block_size} tokens "
            f"{block_bytes() / _MIB:,.4g} MiB. Set state_cache_gib to at least "
            f"{SLOTS_OF_SEQUENCE * slot_bytes / _GIB:.4g}",
            param="state_cache_gib",
        )
    return StateFit(slot_bytes, num_slots, num_seqs)
