"""`python scripted_node.py`: a node process with the scripted model; settings from PENSTOCK_NODE_* variables."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

# At the end, because the folder `kernels` of the repository would hide a package of that name.
sys.path.append(str(Path(__file__).resolve().parents[2]))
sys.path.append(str(Path(__file__).resolve().parents[3]))

from fakes.scripted_model import ScriptedEngine

from penstock.gpu_node.process import serve_engine
from penstock.gpu_node.settings import NodeSettings
from penstock.runtime import event_loop
from penstock.runtime.settings import RedisSettings


async def main() -> None:
    """Serve until a signal."""
    settings = NodeSettings.load(redis_url=RedisSettings.load().redis_url)
    await serve_engine(settings, ScriptedEngine(settings.tool_parser or "hermes"))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    event_loop.run(main())
