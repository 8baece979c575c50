"""What a node loads before its runner: seconds of a start lie there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HEAVY = {"torch", "transformers", "huggingface_hub", "fastapi", "celery"}


def test_a_node_needs_neither_torch_nor_transformers_until_its_runner_does(tiny_model: Path) -> None:
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "import penstock.gpu_node.process\n"
        "from penstock.gpu_node.engine.text.tokenizer import Tokenizer\n"
        "from penstock.gpu_node.model.checkpoint.stored_tensors import Checkpoint\n"
        "from penstock.gpu_node.model.architecture.families import family_of\n"
        "from penstock.gpu_node.model.checkpoint.description import revision_of\n"
        "from penstock.gpu_node.model.checkpoint.source import resolve_model\n"
        f"source = resolve_model({str(tiny_model)!r}, print)\n"
        "Tokenizer(source.folder).encode_chat([{'role': 'user', 'content': 'x'}])\n"
        "Checkpoint.open(source).get('model.norm.weight', 64).to_float32()\n"
        "revision_of(source, 'float32')\n"
        "print(*{name.partition('.')[0] for name in sys.modules})\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "numpy" in done.stdout.split()
    assert not set(done.stdout.split()) & HEAVY
