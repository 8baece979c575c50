"""`python reference_node.py`: a node process around the reference engine; settings from PENSTOCK_NODE_* variables."""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from reference_engine import BulkEngine, DifferingEngine, FailingEngine, ReferenceEngine, ReferenceTokenizer

from penstock.gpu_node.engine.shared_cores import SharedCores
from penstock.gpu_node.process import serve_engine
from penstock.gpu_node.settings import NodeSettings
from penstock.runtime import event_loop
from penstock.runtime.settings import RedisSettings


class HangingTokenizer(ReferenceTokenizer):
    """A tokenizer that prints a line and then hangs at every prompt."""

    def encode(self, text: str, *, framed: bool = True) -> list[int]:
        """Print a line and never return."""
        print('{"event": "hangs"}', flush=True)
        while True:
            time.sleep(3600)


async def main() -> None:
    """Serve until a signal. `REFERENCE_STEP_S`: seconds per step; `REFERENCE_TOKENIZER_HANGS`: use HangingTokenizer;
    `REFERENCE_TOKENS_PER_STEP`: use a BulkEngine; `REFERENCE_ERROR_SHARE`: use a FailingEngine;
    `REFERENCE_DIFFERS`: use a DifferingEngine; `REFERENCE_SHARE`: let background work wait for other nodes of the
    runtime folder, but for this share.
    """
    settings = NodeSettings.load(redis_url=RedisSettings.load().redis_url, model="reference")
    step_s = float(os.environ.get("REFERENCE_STEP_S", "0"))
    options = {"step_s": step_s, "max_num_seqs": settings.max_num_seqs}
    num_at_once = os.environ.get("REFERENCE_TOKENS_PER_STEP")
    engine = BulkEngine(tokens_per_step=int(num_at_once), **options) if num_at_once else ReferenceEngine(**options)
    if error_share := float(os.environ.get("REFERENCE_ERROR_SHARE", "0")):
        engine = FailingEngine(error_share=error_share, **options)
    if os.environ.get("REFERENCE_DIFFERS"):
        engine = DifferingEngine(**options)
    if os.environ.get("REFERENCE_TOKENIZER_HANGS"):
        engine.tokenizer = HangingTokenizer()
    share = os.environ.get("REFERENCE_SHARE")
    await serve_engine(settings, engine, gate=None if share is None else SharedCores.join(float(share)))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    event_loop.run(main())
