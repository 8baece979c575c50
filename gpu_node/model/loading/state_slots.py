"""The state slots of a model that is to be loaded."""

from __future__ import annotations

import logging
from typing import TypeVar

from penstock.gpu_node.model.architecture.spec import state_bytes
from penstock.gpu_node.model.checkpoint.description import Description
from penstock.gpu_node.model.checkpoint.state_slots import fit_states
from penstock.gpu_node.model.loading.load import FoundModel
from penstock.gpu_node.model.loading.plan import runner_for, sizes_of
from penstock.gpu_node.model.options import RunnerOptions

log = logging.getLogger(__package__)

Options = TypeVar("Options", bound=RunnerOptions)


def with_state_slots(found: FoundModel, options: Options) -> Options:
    """Return options with the number of state slots, and with fewer sequences if not all of their states fit.

    Raises ConfigError if the memory does not hold the states of one sequence.
    """
    if not isinstance(described := found.description, Description):
        return options
    spec = described.spec
    if not (slot_bytes := state_bytes(spec)):
        return options

    def block_bytes() -> int:
        sizes = sizes_of(described, options, runner_for(described, options, on_gpus=False))
        return sizes.kv_token_bytes(spec, range(spec.num_layers)) * options.block_size

    fit = fit_states(options, slot_bytes, block_bytes)
    if fit.max_num_seqs < options.max_num_seqs:
        facts = {"wanted": options.max_num_seqs, "max_num_seqs": fit.max_num_seqs, "state_slots": fit.num_slots}
        facts |= {"state_bytes": slot_bytes, "all_bytes": fit.num_bytes}
        log.warning("max_num_seqs is lowered: the states of more sequences do not fit", extra=facts)
    return options.model_copy(update={"state_slots": fit.num_slots, "max_num_seqs": fit.max_num_seqs})
