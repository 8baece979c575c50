"""How many state slots a runner gets, and how many sequences they allow."""

from __future__ import annotations

import logging
from typing import TypeVar

from penstock.contract.errors import ConfigError
from penstock.gpu_node.model.architecture.spec import state_bytes
from penstock.gpu_node.model.checkpoint.description import SLOTS_OF_SEQUENCE, STATE_SHARE, num_state_slots
from penstock.gpu_node.model.loading.load import FoundModel
from penstock.gpu_node.model.loading.plan import runner_for, sizes_of
from penstock.gpu_node.model.options import RunnerOptions

log = logging.getLogger(__package__)

Options = TypeVar("Options", bound=RunnerOptions)
_MIB = 1 << 20


def with_state_slots(found: FoundModel, options: Options) -> Options:
    """Return options with the number of state slots, and with fewer sequences if not all of their states fit.

    Raises ConfigError if the memory does not hold the states of one sequence.
    """
    slot_bytes = state_bytes(found.described.spec)
    if not slot_bytes:
        return options
    num_slots = num_state_slots(options, slot_bytes)
    num_seqs = min(options.max_num_seqs, num_slots // SLOTS_OF_SEQUENCE)
    if num_seqs < 1:
        raise ConfigError(_problem(found, options, slot_bytes, num_slots), param="state_cache_gib")
    if num_seqs < options.max_num_seqs:
        sizes = {"state_mib": round(slot_bytes / _MIB, 1), "states_mib": round(num_slots * slot_bytes / _MIB, 1)}
        asked = {"asked": options.max_num_seqs, "max_num_seqs": num_seqs, "state_slots": num_slots}
        log.warning("max_num_seqs is lowered: the states of more sequences do not fit", extra=asked | sizes)
    return options.model_copy(update={"state_slots": num_slots, "max_num_seqs": num_seqs})


def _problem(found: FoundModel, options: RunnerOptions, slot_bytes: int, num_slots: int) -> str:
    described, spec = found.described, found.described.spec
    sizes = sizes_of(described, options, runner_for(described, options, on_gpus=False))
    block_mib = sizes.kv_token_bytes(spec, range(spec.num_layers)) * options.block_size / _MIB
    budget = f"state_cache_gib {options.state_cache_gib}"
    if options.state_cache_gib is None:
        budget = f"{STATE_SHARE:.0%} of the free memory"
    return (
        f"{budget} holds {num_slots} states of recurrent layers, but a sequence needs {SLOTS_OF_SEQUENCE}: a state "
        f"takes {slot_bytes / _MIB:,.4g} MiB, a KV block of {options.block_size} tokens {block_mib:,.4g} MiB; set "
        f"state_cache_gib to at least {SLOTS_OF_SEQUENCE * slot_bytes / 2**30:.4g}"
    )
