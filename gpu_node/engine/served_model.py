"""A loaded model as requests use it: limits, tokenizer, grammars and adapters. Any thread may use it."""

from __future__ import annotations

from collections.abc import Callable

from penstock.contract.adapters import AdapterRef
from penstock.contract.job import SamplingParams
from penstock.gpu_node.engine.config import EngineConfig
from penstock.gpu_node.engine.loading import load
from penstock.gpu_node.engine.prepared import Prepared
from penstock.gpu_node.engine.request_limits import request_limits
from penstock.gpu_node.engine.structured.compiler import GrammarCompiler
from penstock.gpu_node.engine.text.bad_words import BadWords
from penstock.gpu_node.engine.text.tokenizer import Tokenizer


class ServedModel:
    """A model with its tokenizer, limits, grammars and adapters."""

    def __init__(self, config: EngineConfig, progress: Callable[[str, float], None]) -> None:
        """Load the model. Raises ConfigError."""
        self._name = config.model
        self._model, self._tokenizer, self.sampling_defaults = load(config, progress)
        """... and the sampling of requests that do not set it, by the names of `SamplingParams`."""
        self._adapters = self._model.adapters
        self._limits = request_limits(self._model, self._tokenizer.eos_token_ids, config.block_size)
        self._guides = GrammarCompiler(self._tokenizer, self._limits.vocab_size, self._limits.eos_token_ids)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._name} max_model_len={self.max_model_len}>"

    def prepare(
        self, params: SamplingParams, adapter: AdapterRef | None = None, *, tenant: str = "default"
    ) -> Prepared:
        """Do the slow part of `add` in advance, on any thread. The result becomes the `prepared` of an EngineRequest.

        Raises RequestError for a request that could never run.
        """
        wanted = params.structured_outputs
        grammar = None if wanted is None else self._guides.prepare(wanted, tenant)
        found = None if adapter is None else self._adapters.find(adapter)
        # The tokenizer may have tokens outside the model's vocabulary.
        words = self._tokenizer.encode_words(params.bad_words)
        return Prepared(grammar, found, BadWords(ids for ids in words if max(ids) < self.vocab_size))

    def adapters(self) -> dict[str, str]:
        """Return the names and digests of the adapters that requests may use now."""
        return self._adapters.digests()

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._tokenizer

    @property
    def max_model_len(self) -> int:
        """Most tokens that prompt and output of one choice may have together."""
        return self._limits.max_model_len

    @property
    def vocab_size(self) -> int:
        """Size of the model's output; token ids are below it."""
        return self._limits.vocab_size

    @property
    def leaves_core_free(self) -> bool:
        """Whether steps leave at least one of the process's cores to other work."""
        return self._model.runner.placement.leaves_core_free

    @property
    def revision(self) -> str:
        """Identifies weights, tokenizer and dtype. Engines of equal revision can continue each other's choices."""
        return self._model.revision
