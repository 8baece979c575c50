"""A rank of the torch or the GPU runner that is not rank 0: it follows the messages, until its group ends."""

from __future__ import annotations

import logging
from functools import partial

import numpy as np

from penstock.gpu_node.model.protocol import (
    NO_ROWS,
    AdapterSource,
    PooledTokens,
    SamplingRows,
    ScoredTokens,
    StepPlan,
    TokenMasks,
)
from penstock.gpu_node.model.ranks.control import GroupMemory
from penstock.gpu_node.model.ranks.member import numbers_of_messages
from penstock.gpu_node.model.ranks.messages import Kind, RankStep, copied, read_adapter, read_masks, read_step
from penstock.gpu_node.model.ranks.plain_exchange import PlainExchange
from penstock.gpu_node.model.torch_common.ranked_runner import PartRunner
from penstock.gpu_node.model.torch_common.ranks import BrokenExchangeError

log = logging.getLogger(__package__)


def follow(memory: GroupMemory, exchange: PlainExchange, runner: PartRunner, adapters: AdapterSource) -> None:
    """Do what the messages ask for, until the group is aborted. Raises BrokenExchangeError if it cannot go on."""
    masks: TokenMasks | None = None
    for number in numbers_of_messages(exchange):
        kind = memory.map_message()
        if kind is Kind.STEP:
            masks = _run(read_step(memory.messages), runner)
        elif kind is Kind.MASKS:
            if masks is not None:
                read_masks(memory.messages, masks)
        else:
            _load_adapter(memory, runner, adapters)
        exchange.note_done(number)


def _run(step: RankStep, runner: PartRunner) -> TokenMasks | None:
    """Compute this rank's part of a step. Return the masks that are still to be read, if there are any."""
    if not runner.all_sample:
        plan = _plan_of(step, NO_ROWS)
        try:
            # If it fails at this rank, all have voted, and rank 0 knows.
            (runner.start_logits(plan) if step.returns_logits else runner.submit(plan)).result()
        except BrokenExchangeError:
            raise
        except Exception as error:
            log.warning("a step failed", extra={"reason": repr(error)})
        return None
    plan = _plan_of(own := copied(step), own.sampling or NO_ROWS)
    if step.returns_logits:
        runner.start_logits(plan).result()
        return None
    runner.submit(plan)
    return plan.sampling.masks


def _plan_of(step: RankStep, sampling: SamplingRows) -> StepPlan:
    scored, pooled = step.scored_tokens, step.pooled_tokens
    unknown = np.zeros_like(scored)
    return StepPlan(
        step.token_ids,
        step.positions,
        step.query_starts,
        step.context_lens,
        step.block_tables,
        step.sample_tokens,
        sampling,
        step.copies,
        step.adapters,
        ScoredTokens(scored, unknown, unknown, unknown) if len(scored) else None,
        PooledTokens(pooled, np.zeros_like(pooled)) if len(pooled) else None,
    )


def _load_adapter(memory: GroupMemory, runner: PartRunner, adapters: AdapterSource) -> None:
    adapter_slot, adapter = read_adapter(memory.messages)
    try:
        runner.start_adapter(adapter_slot, partial(adapters.find, adapter)).result()
    except BrokenExchangeError:
        raise
    except Exception as error:
        log.warning("a rank cannot load an adapter", extra={"adapter": adapter.name, "reason": str(error)})
