"""The searches of an engine: they hold outputs back until all choices of a request are complete, and rank these.

A request's choices are ranked from 0. A node that takes over searches anew, and gets the same result. Of that it skips
what the job's log already has.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Literal, NamedTuple

from penstock.contract.output import Usage
from penstock.gpu_node.engine.records import ResumedChoice, StepOutput
from penstock.gpu_node.engine.request import LiveRequest
from penstock.gpu_node.engine.scheduler.scheduler import Scheduler
from penstock.gpu_node.engine.sequence import Sequence
from penstock.gpu_node.engine.steps import Step
from penstock.gpu_node.engine.text.output import ChoiceOutput, EndReason
from penstock.gpu_node.engine.text.tokenizer import Tokenizer
from penstock.gpu_node.model.protocol import FAILED_TOKEN, Logprobs, StepResult

EarlyStopping = Literal["never"] | bool


class Candidates(NamedTuple):
    """The likeliest next tokens of a beam, and their log-probabilities."""

    token_ids: list[int]
    logprobs: list[float]


class Continuation(NamedTuple):
    """A beam of the next step: the beam that it continues, by its index, and the token."""

    beam: int
    token_id: int


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A complete text."""

    token_ids: tuple[int, ...]
    score: float


class BeamSearch:
    """One search. `beams` are its open texts, the best first."""

    def __init__(
        self,
        width: int,
        end_ids: frozenset[int],
        max_tokens: int,
        *,
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
    ) -> None:
        """A text ends with a token of `end_ids` or has `max_tokens` tokens."""
        self._width = width
        self._end_ids = end_ids
        self._max_tokens = max_tokens
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping
        self.beams: list[tuple[int, ...]] = [()]
        self._sums: list[float] = [0.0]
        """Of each beam, the sum of its tokens' log-probabilities."""
        self.complete: list[Hypothesis] = []
        """The best complete texts, the best first."""

    @property
    def num_candidates(self) -> int:
        """How many of the likeliest next tokens of each beam a step needs: `width` of them do not end the text."""
        return self._width + len(self._end_ids)

    def advance(self, candidates: Items[Candidates]) -> list[Continuation]:
        """Take a step with the candidates of each beam. Return the new beams, the best first; none at the end."""
        length = len(self.beams[0]) + 1
        ordered = sorted(
            (-self._sums[beam] - logprob, beam, token_id)
            for beam, (token_ids, logprobs) in enumerate(candidates)
            for token_id, logprob in zip(token_ids, logprobs, strict=True)
        )
        is_last = length >= self._max_tokens
        for cost, beam, token_id in ordered[: self._width]:
            if is_last or token_id in self._end_ids:
                score = -cost / length**self._length_penalty
                self.complete.append(Hypothesis((*self.beams[beam], token_id), score))
        self.complete.sort(key=lambda one: -one.score)
        del self.complete[self._width :]
        going_on = [] if is_last else [one for one in ordered if one[2] not in self._end_ids][: self._width]
        self.beams = [(*self.beams[beam], token_id) for _, beam, token_id in going_on]
        self._sums = [-cost for cost, _, _ in going_on]
        if not going_on or self._has_ended(length):
            self.beams.clear()
            return []
        return [Continuation(beam, token_id) for _, beam, token_id in going_on]

    def _has_ended(self, length: int) -> bool:
        """Return whether no open beam is expected to become better than the worst complete text."""
        if len(self.complete) < self._width:
            return False
        if self._early_stopping is True:
            return True
        if self._early_stopping == "never" and self._length_penalty > 0:
            # The sum only falls; at most it is divided by the greatest length.
            length = self._max_tokens
        best_score: float = self._sums[0] / length**self._length_penalty
        return best_score <= self.complete[-1].score


@dataclass(slots=True)
class SharedBlocks:
    """Blocks that the beams of a search would hold without sharing, and those that they hold; sums over its steps."""

    needed: int = 0
    held: int = 0

    def note(self, seqs: Items[Sequence]) -> None:
        """Count the blocks of a step."""
        self.needed += sum(len(seq.blocks) for seq in seqs)
        self.held += len({block for seq in seqs for block in seq.blocks})


class LiveBeams:
    """A beam search with the sequences that compute its beams."""

    def __init__(self, request: LiveRequest) -> None:
        params, seqs = request.asked.params, [choice.seq for choice in request.live.values()]
        rule = seqs[0].end_rule
        self.request = request
        self.search = BeamSearch(
            params.num_sequences,
            rule.end_ids,
            rule.max_tokens,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
        )
        self.all_seqs = seqs
        self.remaining = seqs[0].beams or []
        """The sequences that the scheduler still has."""
        self.has_failed = False
        self._active = seqs[:1]
        """The sequence of each beam, in the order of the beams. The first step has one beam."""
        self._candidates: dict[Sequence, Candidates] = {}

    def note(self, seq: Sequence, rows: Logprobs, row: int) -> None:
        """Keep the candidates of a beam that has computed its newest token."""
        wanted = slice(1, 1 + self.search.num_candidates)
        self._candidates[seq] = Candidates(rows.token_ids[row, wanted].tolist(), rows.values[row, wanted].tolist())

    @property
    def is_ready(self) -> bool:
        """Whether all beams have computed their newest token. One that was preempted has lost it."""
        return all(seq.is_parked for seq in self._active)

    @property
    def num_beams(self) -> int:
        """The number of beams that the newest step followed."""
        return len(self._active)

    def advance(self, scheduler: Scheduler, shared: SharedBlocks) -> bool:
        """Take a step of the search. Return whether it goes on."""
        shared.note(self._active)
        self.request.completion_tokens += len(self._active)
        continued = self.search.advance([self._candidates.pop(seq) for seq in self._active])
        if not continued:
            return False
        sources = [self._active[one.beam] for one in continued]
        # A beam stays where its sequence is; those that continue the same beam get the sequences of beams that end.
        kept = dict.fromkeys(sources)
        unused = iter([seq for seq in self.all_seqs if seq not in kept])
        self._active = []
        for source in sources:
            if source in kept:
                del kept[source]
                self._active.append(source)
            else:
                self._active.append(next(unused))
        tokens = [one.token_id for one in continued]
        scheduler.continue_beams(list(zip(self._active, sources, tokens, strict=True)))
        return True

    def outputs(self, tokenizer: Tokenizer) -> list[StepOutput]:
        """Return the outputs of a search that has ended: its best texts, or errors."""
        params = self.request.asked.params
        if self.has_failed:
            return [self._output(rank, (), "", "error") for rank in range(params.n)]
        found = []
        for rank, one in enumerate(self.search.complete[: params.n]):
            detokenizer = tokenizer.new_detokenizer(begins_text=self.request.asked.begins_text)
            keeps_end = params.include_stop_str_in_output
            text = ChoiceOutput(self.all_seqs[0].end_rule, (), detokenizer, includes_stop=keeps_end)
            for token_id in one.token_ids:
                text.push(token_id)
            found.append(self._output(rank, one.token_ids, text.take_text(), text.finish_reason))
        return found

    def _output(self, rank: int, token_ids: tuple[int, ...], text: str, reason: EndReason | None) -> StepOutput:
        return StepOutput(self.request.asked.request_id, rank, 0, token_ids, text, reason)


class BestOf:
    """The outputs of a request's choices, until all are complete."""

    def __init__(self, request: LiveRequest) -> None:
        self.request = request
        self._outputs: list[list[StepOutput]] = [[] for _ in range(request.asked.params.num_sequences)]

    def take(self, output: StepOutput, shared: SharedBlocks, block_size: int) -> None:
        """Keep an output."""
        if output.position % block_size == 0:
            shared.note([choice.seq for choice in self.request.live.values()])
        self._outputs[output.choice].append(output)

    def outputs(self) -> list[StepOutput]:
        """Return the outputs of the best choices: those with the highest mean log-probability of a token.

        Of equal ones, the choice that comes first. A choice that failed is worse than all others.
        """
        params = self.request.asked.params
        ranked = sorted(self._outputs, key=lambda outputs: -_mean_logprob(outputs))
        found = []
        for rank, outputs in enumerate(ranked[: params.n]):
            for output in outputs:
                output.choice = rank
                if params.logprobs is None:
                    output.logprobs = ()
            found += outputs
        return found


def _mean_logprob(outputs: Items[StepOutput]) -> float:
    values = [entry.values[0] for output in outputs for entry in output.logprobs]
    if outputs[-1].finish_reason == "error" or not values:
        return -math.inf
    return sum(values) / len(values)


class Searches:
    """The requests of an engine that hold their outputs back. Without any, a step only reads `is_active`."""

    def __init__(self, scheduler: Scheduler, tokenizer: Tokenizer, block_size: int) -> None:
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._block_size = block_size
        self.is_active = False
        """Whether there is any such request, or outputs of one that has ended."""
        # Keyed by id: id of a request.
        self._beams: dict[str, LiveBeams] = {}
        # Keyed by id: id of a request.
        self._best_of: dict[str, BestOf] = {}
        self._to_advance: list[LiveBeams] = []
        self._ended: list[LiveBeams] = []
        self.shared = SharedBlocks()
        self.num_tokens = 0
        """Tokens that beams have computed, those that no result contains included."""

    def add(self, request: LiveRequest) -> None:
        """Hold the outputs of a request back until all of its choices are complete."""
        request_id = request.asked.request_id
        if request.asked.params.use_beam_search:
            self._beams[request_id] = LiveBeams(request)
        else:
            self._best_of[request_id] = BestOf(request)
        self.is_active = True

    def drop(self, request_id: str) -> None:
        """Forget a request that is aborted."""
        self._beams.pop(request_id, None)
        self._best_of.pop(request_id, None)
        self._ended = [one for one in self._ended if one.request.asked.request_id != request_id]
        self.is_active = bool(self._beams or self._best_of or self._ended)

    def take_samples(self, step: Step, result: StepResult, late: Items[int]) -> Items[int]:
        """Take the candidates of a computed step's beams, and park these. Return `late` with the beams' samples.

        A beam's token is chosen when all beams of its search have theirs, so it counts as not drawn yet.
        """
        taken = []
        for i, (seq, token) in enumerate(zip(step.sampled_seqs, result.tokens.tolist(), strict=True)):
            if seq.beams is None or seq.row < 0 or (live := self._beams.get(seq.request_id)) is None:
                continue
            if token == FAILED_TOKEN or result.logprobs is None:
                live.has_failed = True
            else:
                live.note(seq, result.logprobs, i)
                self._scheduler.park(seq)
                taken.append(i)
            if live not in self._to_advance:
                self._to_advance.append(live)
        return [*late, *taken] if taken else late

    def advance(self) -> list[LiveRequest]:
        """Take a step of each search whose beams are ready. Return the requests whose search has ended."""
        found, self._to_advance = self._to_advance, []
        ended = []
        for live in found:
            goes_on = not live.has_failed
            if goes_on and live.is_ready:
                self.num_tokens += live.num_beams
                goes_on = live.advance(self._scheduler, self.shared)
            if not goes_on:
                ended.append(self._end(live))
        return ended

    def fail(self, seq: Sequence) -> LiveRequest | None:
        """End the search of a beam that the scheduler has dropped. Return its request; None if there is no search."""
        if seq.beams is None or (live := self._beams.get(seq.request_id)) is None:
            return None
        live.has_failed = True
        return self._end(live)

    def release(self, outputs: list[StepOutput]) -> list[StepOutput]:
        """Return the outputs without those that are held back, and with those of complete requests."""
        released = []
        for output in outputs:
            best_of = self._best_of.get(output.request_id)
            if best_of is None or output.prefill is not None:
                released.append(output)
                continue
            best_of.take(output, self.shared, self._block_size)
            if output.usage is not None:
                del self._best_of[output.request_id]
                released += self._whole(best_of.request, best_of.outputs(), output.usage)
        ended, self._ended = self._ended, []
        for live in ended:
            released += self._whole(live.request, live.outputs(self._tokenizer), live.request.usage())
        self.is_active = bool(self._beams or self._best_of)
        return released

    def _end(self, live: LiveBeams) -> LiveRequest:
        for seq in list(live.remaining):
            self._scheduler.remove(seq)
        del self._beams[live.request.asked.request_id]
        self._ended.append(live)
        return live.request

    def _whole(self, request: LiveRequest, outputs: list[StepOutput], usage: Usage) -> list[StepOutput]:
        """Return the outputs of a complete request that its log does not have yet. The first one has what all used."""
        resume = request.asked.resume
        found = [one for one in outputs if one.choice >= len(resume) or _is_new(one, resume[one.choice])]
        seqs = request.all_seqs
        for output in found:
            output.usage, output.kv_token_ms, output.num_preemptions = None, 0.0, 0
            output.prompt_logprobs = output.prompt_logprobs or request.take_prompt_logprobs(self._tokenizer)
        found[-1].usage = usage
        found[-1].kv_token_ms = sum(seq.kv_token_ms for seq in seqs)
        found[-1].num_preemptions = sum(seq.num_preemptions for seq in seqs)
        return found


def _is_new(output: StepOutput, logged: ResumedChoice) -> bool:
    return logged.finish_reason is None and output.position >= len(logged.token_ids)
