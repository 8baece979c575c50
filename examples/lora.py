"""Ask a model and one of its LoRA adapters the same: `python examples/lora.py ADAPTER`.

The node must know the adapter: `penstock serve MODEL --lora ADAPTER=/path/to/it`.
"""

import sys

from penstock import Client

PROMPT = "The capital of France is"

if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/lora.py ADAPTER")
    adapter = sys.argv[1]
    with Client() as client:
        base = client.submit(PROMPT, max_tokens=16, temperature=0)
        adapted = client.submit(PROMPT, adapter=adapter, max_tokens=16, temperature=0)
        print(f"base model: {base.result().text!r}")
        print(f"{adapter}: {adapted.result().text!r}")
