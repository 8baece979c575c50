"""Run a model in this process, without a queue: `python examples/offline.py MODEL`.

MODEL is a folder, a `.gguf` file or a hub id, as for `penstock serve`; `penstock doctor` names the demo model's file.
The prompts run as one batch.
"""

import sys

from penstock import Engine, SamplingParams

PROMPTS = ["The capital of France is", "Water boils at", "Once upon a time"]

if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/offline.py MODEL")
    engine = Engine(sys.argv[1], kv_cache_dtype="auto", max_num_seqs=16)
    generations = engine.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=16))
    for prompt, generation in zip(PROMPTS, generations, strict=True):
        print(f"{prompt}{generation.text!r}")
