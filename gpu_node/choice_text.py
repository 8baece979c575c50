"""One choice of a held job: its output so far, and the part of it that is in no chunk yet."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.contract.output import Chunk, FinishReason, TokenLogprobs, Usage
from penstock.gpu_node.engine.records import StepOutput
from penstock.queue.chunks import Rows


@dataclass(slots=True)
class ChoiceText:
    """A choice's output so far. The `fresh_` fields hold what goes into the next chunk.

    `rows`: packed log-probabilities of the chunks so far, either one entry per token or none.
    """

    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    rows: list[Rows] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    fresh_ids: list[int] = field(default_factory=list)
    fresh_texts: list[str] = field(default_factory=list)
    fresh_logprobs: list[TokenLogprobs] = field(default_factory=list)

    def extend(self, new: Chunk | StepOutput, *, is_fresh: bool = False) -> None:
        """Append logged output of an earlier node or the output of a step. `is_fresh`: it is in no chunk yet."""
        self.token_ids += new.token_ids
        self.texts.append(new.text)
        self.finish_reason = new.finish_reason
        if is_fresh:
            self.fresh_ids += new.token_ids
            self.fresh_texts.append(new.text)
            self.fresh_logprobs += new.logprobs

    def take_fresh(self, job_id: str, index: int, choice: int, usage: Usage | None) -> Chunk:
        """Return the next chunk, and clear the `fresh_` fields."""
        num_fresh = len(self.fresh_ids)
        chunk = Chunk(
            job_id,
            index,
            choice,
            len(self.token_ids) - num_fresh,
            tuple(self.fresh_ids),
            "".join(self.fresh_texts),
            self.finish_reason,
            usage,
            logprobs=tuple(self.fresh_logprobs),
        )
        self.fresh_ids.clear()
        self.fresh_texts.clear()
        self.fresh_logprobs.clear()
        return chunk
