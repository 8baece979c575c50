"""Load a model, its runner and its tokenizer from an engine's settings."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

from penstock.gpu_node.engine.config import EngineConfig
from penstock.gpu_node.engine.text.tokenizer import Tokenizer
from penstock.gpu_node.model.protocol import LoadedModel
from penstock.runtime.gc_freeze import no_collection

Defaults = dict[str, int | float]
_HEAD_START_S = 0.05
"""Head start of the load thread. Reading a tokenizer holds the GIL for tenths of a second; after its start, the load
thread mostly works without the GIL."""


def load(config: EngineConfig, progress: Callable[[str, float], None]) -> tuple[LoadedModel, Tokenizer, Defaults]:
    """Load the model that `config` names, its tokenizer and its default sampling. Raises ConfigError."""
    # A thread that spins at an OpenMP barrier takes the core from the thread it waits for: beside other processes,
    # steps took 6 times as long. Threads that sleep at once cost 40 % of an idle machine's speed. A short spin (about
    # 20 µs) avoids both. The OpenMP runtime reads these variables when torch is imported for the first time.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    # One prompt gains nothing from the tokenizer's own thread pool, and a process that has one cannot fork.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Torch is imported only here: modules that import the engine for its records do not pay for it.
    from penstock.gpu_node.model.checkpoint.generation_config import sampling_defaults
    from penstock.gpu_node.model.load import find_model, load_found

    # Load on a thread that ends. Torch keeps an OpenMP team for every living thread; with more team threads than
    # cores, they stop spinning at barriers, which costs a step 40 % of its speed.
    with ThreadPoolExecutor(1, "penstock-load") as loader:
        # A collection would scan the many objects of a vocabulary, again and again, and free none.
        with no_collection():
            found = loader.submit(find_model, config.model, config, progress, revision=config.revision).result()
        loading = loader.submit(load_found, found, config, progress)
        wait([loading], _HEAD_START_S)
        try:
            defaults = sampling_defaults(config.generation_config, found.source.folder)
            vocab_size = found.described.spec.vocab_size
            tokenizer = Tokenizer(found.source.folder, vocab_size=vocab_size, written=found.tokenizer)
        finally:
            # If both fail, the error of the runner is raised.
            model = loading.result()
    return model, tokenizer, defaults
