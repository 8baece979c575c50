"""Makes the requests of a load."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from penstock.cli.bench.arrivals import arrival_times
from penstock.cli.bench.datasets import read_dataset, sampled
from penstock.cli.bench.lengths import HASH_BLOCK_TOKENS, TokenRatio, hashed_words, random_lengths, words
from penstock.cli.bench.options import WorkloadOptions
from penstock.cli.bench.records import PlannedRequest, Prompt
from penstock.cli.bench.traces import TracedRequest, read_trace

DEFAULT_NUM_PROMPTS = 100
DEFAULT_ANSWER_TOKENS = 128
"""Length of an answer, in tokens, if the dataset's file does not state it."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The options that decide which requests arrive when, and how the server counts words."""

    options: WorkloadOptions
    ratio: TokenRatio

    def plan(self) -> list[PlannedRequest]:
        """Return the requests in order of arrival. Equal options give equal requests. Raises RequestError."""
        options = self.options
        if options.trace is not None:
            lines = read_trace(options.trace, options.num_prompts)
            return [self._traced(number, line) for number, line in enumerate(lines)]
        random = Random(options.seed)
        prompts = self._prompts(random)
        times = arrival_times(len(prompts), options.request_rate, options.burstiness, random)
        return [PlannedRequest(due_s, *prompt) for due_s, prompt in zip(times, prompts, strict=True)]

    def warmups(self, num_warmups: int) -> list[PlannedRequest]:
        """Return requests of words that the plan does not have, so that no prefix cache knows the plan's."""
        random = Random(f"warmup {self.options.seed}")
        num_words, num_output = self.ratio.num_words(self.options.random_input_len), self.options.random_output_len
        return [PlannedRequest(0.0, words(random, num_words), num_output) for _ in range(num_warmups)]

    def _prompts(self, random: Random) -> list[tuple[Prompt, int]]:
        options, ratio = self.options, self.ratio
        num_prompts = options.num_prompts or DEFAULT_NUM_PROMPTS
        if options.dataset_path is not None:
            given = options.dataset_output_len
            samples = sampled(read_dataset(options.dataset_path), num_prompts, random)
            return [(prompt, given or length or DEFAULT_ANSWER_TOKENS) for prompt, length in samples]
        prefix = words(random, round(options.random_prefix_len / ratio.tokens_per_word))
        spread = options.random_range_ratio
        inputs = random_lengths(options.random_input_len, spread, num_prompts, random)
        outputs = random_lengths(options.random_output_len, spread, num_prompts, random)
        texts = (f"{prefix} {words(random, ratio.num_words(length))}".lstrip() for length in inputs)
        return list(zip(texts, outputs, strict=True))

    def _traced(self, number: int, traced: TracedRequest) -> PlannedRequest:
        due_s = traced.arrival_s / self.options.trace_speed
        if traced.prompt is not None:
            return PlannedRequest(due_s, traced.prompt, traced.num_output_tokens)
        num_words = self.ratio.num_words(traced.num_prompt_tokens)
        if traced.hash_ids:
            words_per_block = max(1, round(HASH_BLOCK_TOKENS / self.ratio.tokens_per_word))
            prompt = hashed_words(traced.hash_ids, num_words, words_per_block)
        else:
            prompt = words(Random(f"{self.options.seed} {number}"), num_words)
        return PlannedRequest(due_s, prompt, traced.num_output_tokens)
