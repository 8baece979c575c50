"""The state slots of a model that is to be loaded."""

from __future__ import annotations

import logging
from typing import TypeVar

from penstock.gpu_node.model.architecture.spec import state_bytes
from penstock.gpu_node.model.checkpoint.description import Description
from penstock.gpu_node.model.checkpoint.state_slots import fit_states
from penstock.gpu_node.model.loading.load import FoundModel, free_on_gpu
from penstock.gpu_node.model.loading.plan import runner_for, sizes_of
from penstock.gpu_node.model.options import RunnerOptions

log = logging.getLogger(__package__)

Options = TypeVar("Options", bound=RunnerOptions)


def with_state_slots(found: FoundModel, options: Options) -> Options:
    """Return options with the number of state slots, and with fewer sequences if not all of their states fit.

    Raises ConfigError if the memory does not hold the states of one sequence.
    """
    described, free_bytes = found.description, None
    slot_bytes = state_bytes(described.spec) if isinstance(described, Description) else described.slot_bytes
    if not slot_bytes:
        return options
    if isinstance(described, Description) and (on_gpu := free_on_gpu(described, options)) is not None:
        free_bytes = on_gpu - sizes_of(described, options, "gpu").weight_bytes

    def block_bytes() -> int:
        if not isinstance(described, Description):
            return described.token_bytes * options.block_size
        sizes = sizes_of(described, options, runner_for(described, options, on_gpus=free_bytes is not None))
        return sizes.kv_token_bytes(described.spec, range(described.spec.num_layers)) * options.block_size

    fit = fit_states(options, slot_bytes, block_bytes, free_on_gpu=free_bytes)
    if fit.max_num_seqs < options.max_num_seqs:
        facts = {"wanted": options.max_num_seqs, "max_num_seqs": fit.max_num_seqs, "state_slots": fit.num_slots}
        facts |= {"state_bytes": slot_bytes, "all_bytes": fit.num_bytes}
        log.warning("max_num_seqs is lowered: the states of more sequences do not fit", extra=facts)
    return options.model_copy(update={"state_slots": fit.num_slots, "max_num_seqs": fit.max_num_seqs})
