"""A loaded model as requests use it: limits, tokenizer, grammars and adapters. Any thread may use it."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from penstock.contract.adapters import AdapterRef
from penstock.contract.errors import ConfigError, PromptTooLongError, RequestError
from penstock.contract.job import MAX_TOKENS_LIMIT, SamplingParams
from penstock.contract.output import MAX_LOGPROBS_OF_JOB
from penstock.contract.priority import NUM_LEVELS
from penstock.contract.tasks import Embed, Pooling
from penstock.gpu_node.engine.config import EngineConfig, chat_template_of
from penstock.gpu_node.engine.pair_scores import PairScores, pair_scores_of
from penstock.gpu_node.engine.records import EngineRequest, Prepared, ResumedChoice
from penstock.gpu_node.engine.structured.compiler import GrammarCompiler
from penstock.gpu_node.engine.text.output import BadWords
from penstock.gpu_node.engine.text.prompts import EmbeddingPrompts
from penstock.gpu_node.engine.text.tokenizer import Tokenizer
from penstock.gpu_node.model.options import runner_name
from penstock.gpu_node.model.plan_records import Devices as Devices
from penstock.gpu_node.model.plan_records import ModelPlan as ModelPlan
from penstock.gpu_node.model.plan_records import ShapeFit as ShapeFit
from penstock.gpu_node.model.protocol import NO_WINDOWS, LoadedModel, WindowSizes
from penstock.runtime.process_memory import no_collection

_HEAD_START_S = 0.05
"""Head start of the load thread. Reading a tokenizer holds the GIL for tenths of a second; after its start, the load
thread mostly works without the GIL."""


class Loaded(NamedTuple):
    """A model with its tokenizer, and the config that it was loaded with."""

    model: LoadedModel
    tokenizer: Tokenizer
    sampling_defaults: dict[str, int | float]
    config: EngineConfig


def load(config: EngineConfig, progress: Callable[[str, float], None]) -> Loaded:
    """Load the model that `config` names, its tokenizer and its default sampling. Raises ConfigError."""
    # A thread that spins at an OpenMP barrier takes the core from the thread it waits for: beside other processes,
    # steps took 6 times as long. Threads that sleep at once cost 40 % of an idle machine's speed. A short spin (about
    # 20 µs) avoids both. The OpenMP runtime reads these variables when torch is imported for the first time.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    # One prompt gains nothing from the tokenizer's own thread pool, and a process that has one cannot fork.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Torch is imported only here: modules that import the engine for its records do not pay for it.
    from penstock.gpu_node.model.checkpoint.description import revision_with
    from penstock.gpu_node.model.checkpoint.generation_config import sampling_defaults
    from penstock.gpu_node.model.loading.load import find_model, load_found
    from penstock.gpu_node.model.loading.state_slots import with_state_slots

    # Load on a thread that ends. Torch keeps an OpenMP team for every living thread; with more team threads than
    # cores, they stop spinning at barriers, which costs a step 40 % of its speed.
    with ThreadPoolExecutor(1, "penstock-load") as loader:
        # A collection would scan the many objects of a vocabulary, again and again, and free none.
        template = None if config.chat_template is None else chat_template_of(config.chat_template)
        with no_collection():
            found = loader.submit(find_model, config.model, config, progress, revision=config.revision).result()
        config = with_state_slots(found, config)
        loading = loader.submit(load_found, found, config, progress)
        wait([loading], _HEAD_START_S)
        try:
            defaults = sampling_defaults(config.generation_config, found.source.folder)
            vocab_size = found.vocab_size
            tokenizer = Tokenizer(
                found.source.folder,
                vocab_size=vocab_size,
                written=found.tokenizer,
                chat_template=template,
                tool_parser=config.tool_parser,
                reasoning_parser=config.reasoning_parser,
            )
        finally:
            # If both fail, the error of the runner is raised.
            model = loading.result()
    if template is not None:
        model = replace(model, revision=revision_with(model.revision, template))
    if config.reasoning_parser is not None:
        # It decides where a budget ends the reasoning, so a node with another one must not continue a job.
        model = replace(model, revision=revision_with(model.revision, f"reasoning {config.reasoning_parser}"))
    return Loaded(model, tokenizer, defaults, config)


def plan(config: EngineConfig, devices: Devices, shapes: Items[tuple[int, int, int]]) -> ModelPlan:
    """Return what the model that `config` names takes of devices, in each shape: ranks, stages, replicas.

    It reads the model's config and the headers of its files. Raises ConfigError.
    """
    from penstock.gpu_node.model.loading.load import find_model
    from penstock.gpu_node.model.loading.plan import plan_model

    found = find_model(config.model, config, lambda _stage, _done: None, revision=config.revision)
    return plan_model(found, config, devices, shapes)


def compute_for(join: str, secret_file: Path, model: str, revision: str | None, own: Mapping[str, Any]) -> None:
    """Compute a part of a model for a node on another host, HOST:PORT, until this process is ended.

    own: options of this host in place of the node's. Raises ConfigError.
    """
    from penstock.gpu_node.model.loading.joined_rank import follow_rank_0

    if "runner" in own:
        try:
            own = {**own, "runner": runner_name(own["runner"])}
        except ValueError as error:
            raise ConfigError(f"runner {own['runner']} {error}", param="runner") from error
    follow_rank_0(join, secret_file, model, revision, own)


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The limits that requests are checked against."""

    vocab_size: int
    max_model_len: int
    bound_by: str
    """Explanation of `max_model_len` for error messages."""
    eos_token_ids: frozenset[int]
    hidden_size: int
    default_pooling: Pooling
    max_num_seqs: int
    num_device_blocks: int
    block_size: int
    windows: WindowSizes = NO_WINDOWS
    """The blocks of layers with windows, where these have blocks of their own."""
    pairs: PairScores | None = None
    """How the model scores pairs; None if it does not."""


def request_limits(
    model: LoadedModel,
    eos_token_ids: frozenset[int],
    block_size: int,
    max_num_seqs: int,
    pairs: PairScores | None = None,
) -> RequestLimits:
    """Return the limits of a loaded model; `eos_token_ids` are the tokenizer's."""
    sizes = model.runner.cache_sizes
    num_kv_tokens, num_swap_tokens = sizes.num_device_blocks * block_size, sizes.num_host_blocks * block_size
    bound_by = "the model's context"
    # A sequence that both pools together cannot hold alone could never finish.
    if num_kv_tokens + num_swap_tokens < model.max_model_len:
        bound_by = f"the KV cache holds {num_kv_tokens} tokens, the swap space {num_swap_tokens}"
    return RequestLimits(
        vocab_size=model.vocab_size,
        max_model_len=min(model.max_model_len, num_kv_tokens + num_swap_tokens),
        bound_by=bound_by,
        # Model files may list end tokens for which the model has no logit.
        eos_token_ids=frozenset(one for one in model.eos_token_ids | eos_token_ids if 0 <= one < model.vocab_size),
        hidden_size=model.hidden_size,
        default_pooling=model.pooling,
        max_num_seqs=max_num_seqs,
        num_device_blocks=sizes.num_device_blocks,
        block_size=block_size,
        windows=sizes.windows,
        pairs=pairs,
    )


def check_request(request: EngineRequest, limits: RequestLimits) -> None:
    """Refuse a request that the engine cannot run; the error names field and limit.

    Raises PromptTooLongError if the prompt, or prompt and `max_tokens`, exceed the context; RequestError for the rest.
    """
    if request.embed is None:
        _check_prompt(request.prompt_token_ids, request.params, limits)
    else:
        _check_embedded(request.prompt_token_ids, request.embed, limits)
    _check_logprobs(request.prompt_token_ids, request.params)
    if request.params.use_beam_search:
        _check_beams(request.prompt_token_ids, request.params, limits)
    _check_tokens(request.prompt_token_ids, request.params, limits)
    _check_resume(request.resume, request.params, limits)
    if request.level not in range(NUM_LEVELS):
        raise RequestError(f"level is {request.level}, but must be 0 to {NUM_LEVELS - 1}", param="level")
    if not 0 < request.weight < math.inf:
        raise RequestError(f"weight is {request.weight}, but must be finite and above 0", param="weight")


def truncated(token_ids: list[int], params: SamplingParams) -> list[int]:
    """Return the tokens of a prompt that the request keeps: the last `truncate_prompt_tokens`, or all."""
    limit = params.truncate_prompt_tokens
    return token_ids if limit is None else token_ids[-limit:]


def _check_prompt(prompt: Items[int], params: SamplingParams, limits: RequestLimits) -> None:
    """Refuse a request longer than the context."""
    _require_tokens(prompt)
    if len(prompt) + 1 > limits.max_model_len:
        raise PromptTooLongError(
            f"This model's maximum context length is {limits.max_model_len} tokens, with at least one to generate; "
            f"the prompt has {len(prompt)} tokens. Limit: {limits.bound_by}",
            param="prompt",
        )
    if params.max_tokens is not None and len(prompt) + params.max_tokens > limits.max_model_len:
        raise PromptTooLongError(
            f"This model's maximum context length is {limits.max_model_len} tokens; the prompt ({len(prompt)} tokens) "
            f"and max_tokens ({params.max_tokens}) exceed it together. Limit: {limits.bound_by}",
            param="max_tokens",
        )
    if len(prompt) + params.min_tokens > limits.max_model_len:
        raise PromptTooLongError(
            f"This model's maximum context length is {limits.max_model_len} tokens; the prompt ({len(prompt)} tokens) "
            f"and min_tokens ({params.min_tokens}) exceed it together. Limit: {limits.bound_by}",
            param="min_tokens",
        )


def max_tokens_of_beams(prompt: Items[int], params: SamplingParams, limits: RequestLimits) -> int:
    """Return how many tokens each beam may have, so that all beams fit the KV cache even if they share no output."""
    num_shared, rest = divmod(len(prompt), limits.block_size)
    width, most = params.num_sequences, limits.num_device_blocks - num_shared
    num_tokens = most // width * limits.block_size - rest
    each = limits.windows.most_held(limits.block_size) + 1
    if not limits.windows.num_blocks or width * each <= limits.windows.num_blocks:
        return num_tokens
    # The beams share the prompt's window, and each has its own tokens' blocks.
    in_windows = (limits.windows.num_blocks - each) // width - 1
    return min(num_tokens, in_windows * limits.block_size)


def _check_beams(prompt: Items[int], params: SamplingParams, limits: RequestLimits) -> None:
    """Refuse beams that cannot be computed together."""
    width = params.num_sequences
    if width > limits.max_num_seqs:
        message = f"use_beam_search: {width} beams, but a step of this node has at most {limits.max_num_seqs} sequences"
        raise RequestError(message, param="use_beam_search")
    most = max_tokens_of_beams(prompt, params, limits)
    if most < (params.max_tokens or 1):
        num_kv_tokens = limits.num_device_blocks * limits.block_size
        raise PromptTooLongError(
            f"use_beam_search: {width} beams after {len(prompt)} prompt tokens may have {max(0, most)} tokens each, "
            f"fewer than max_tokens ({params.max_tokens or 1}). Limit: the KV cache holds {num_kv_tokens} tokens",
            param="max_tokens" if params.max_tokens else "prompt",
        )


def _check_embedded(prompt: Items[int], wanted: Embed, limits: RequestLimits) -> None:
    """Refuse a prompt longer than the context, and an embedding with more dimensions than the model has."""
    _require_tokens(prompt)
    if len(prompt) > limits.max_model_len:
        raise PromptTooLongError(
            f"This model's maximum context length is {limits.max_model_len} tokens; the prompt has {len(prompt)} "
            f"tokens. Limit: {limits.bound_by}",
            param="prompt",
        )
    if (wanted.dimensions or 0) > limits.hidden_size:
        message = f"dimensions is {wanted.dimensions}, but this model's embeddings have {limits.hidden_size}"
        raise RequestError(message, param="dimensions")


def _require_tokens(prompt: Items[int]) -> None:
    if not prompt:
        raise RequestError("prompt must have at least one token", param="prompt")


def _check_tokens(prompt: Items[int], params: SamplingParams, limits: RequestLimits) -> None:
    """Refuse token ids outside the vocabulary."""
    fields = (("prompt", prompt), ("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias))
    for name, token_ids in fields:
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < limits.vocab_size:
            raise RequestError(f"{name} has a token id outside the vocabulary of {limits.vocab_size}", param=name)


def _check_logprobs(prompt: Items[int], params: SamplingParams) -> None:
    """Refuse more log-probabilities than a result can hold."""
    limit = max_tokens_with_logprobs(prompt, params)
    name = "prompt_logprobs" if params.logprobs is None else "logprobs"
    if limit < (params.max_tokens or max(1, params.min_tokens)):
        raise RequestError(
            f"{name}: at most {MAX_LOGPROBS_OF_JOB} values in all, those of the prompt and of the tokens themselves "
            f"included, allow {max(0, limit)} tokens for each choice",
            param=name,
        )


def max_tokens_with_logprobs(prompt: Items[int], params: SamplingParams) -> int:
    """Return how many tokens each choice may have before the log-probabilities exceed the size of a result."""
    of_prompt = 0 if params.prompt_logprobs is None else len(prompt) * (1 + params.prompt_logprobs)
    left = MAX_LOGPROBS_OF_JOB - of_prompt
    if params.logprobs is None:
        return MAX_TOKENS_LIMIT if left >= 0 else 0
    return left // (params.n * (1 + params.logprobs))


def _check_resume(resume: Items[ResumedChoice], params: SamplingParams, limits: RequestLimits) -> None:
    """Refuse a log that this model cannot have written for this request."""
    if len(resume) > params.n:
        raise RequestError(f"resume has {len(resume)} choices, but n is {params.n}", param="resume")
    for choice in resume:
        if any(not 0 <= token_id < limits.vocab_size for token_id in choice.token_ids):
            raise RequestError("a logged token id is outside the vocabulary", param="resume")


class ServedModel:
    """A model with its tokenizer, limits, grammars and adapters."""

    def __init__(self, config: EngineConfig, progress: Callable[[str, float], None]) -> None:
        """Load the model. Raises ConfigError."""
        self.model, self.tokenizer, self.sampling_defaults, config = load(config, progress)
        """... and the sampling of requests that do not set it, by the names of `SamplingParams`."""
        self.config = config
        """The config with what the model requires: fewer sequences if not all of their states fit."""
        self.pairs = pair_scores_of(config.model, self.model, self.tokenizer)
        """How it scores pairs of texts; None if it does not."""
        if self.pairs is None:
            # The default prompt of a reranker is the system message of its pairs.
            self.tokenizer.embedding_prompts = EmbeddingPrompts(self.model.prompts, self.model.default_prompt)
        eos, sizes = self.tokenizer.eos_token_ids, (config.block_size, config.max_num_seqs)
        self.limits = request_limits(self.model, eos, *sizes, self.pairs)
        self.guides = GrammarCompiler(self.tokenizer, self.limits.vocab_size, self.limits.eos_token_ids)

    def capabilities(self) -> tuple[str, ...]:
        """Return what the model's files say it is good for. Raises ConfigError for a template that does not compile."""
        if self.pairs is not None:
            return ("score",)
        if self.model.is_embedder:
            return ("embed",)
        if not self.tokenizer.has_chat_template:
            return ("completion",)
        return ("chat", "completion", "tools") if self.tokenizer.takes_tools else ("chat", "completion")

    def prepare(
        self, params: SamplingParams, adapter: AdapterRef | None = None, *, tenant: str = "default"
    ) -> Prepared:
        """Make the parts of a request that take long, on any thread, so that the engine's thread need not.

        The result becomes the `prepared` of an EngineRequest. Raises RequestError for a request that could never run.
        """
        wanted = params.structured_outputs
        grammar = None if wanted is None else self.guides.prepare(wanted, tenant)
        found = None if adapter is None else self.model.adapters.find(adapter)
        # The tokenizer may have tokens outside the model's vocabulary.
        words = self.tokenizer.encode_words(params.bad_words)
        return Prepared(grammar, found, BadWords(ids for ids in words if max(ids) < self.limits.vocab_size))
