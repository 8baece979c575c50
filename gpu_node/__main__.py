"""`python -m penstock.gpu_node`: a node whose settings come from PENSTOCK_REDIS_URL and PENSTOCK_NODE_* variables."""

from __future__ import annotations

import asyncio
import sys

from penstock.contract.errors import PenstockError
from penstock.contract.logs import configure_logging
from penstock.contract.settings import RedisSettings
from penstock.gpu_node.process import run_node
from penstock.gpu_node.settings import NodeSettings


def main() -> int:
    """Runs one node; answers the exit code."""
    configure_logging()
    try:
        asyncio.run(run_node(NodeSettings.load(redis_url=RedisSettings.load().redis_url)))
    except PenstockError as error:
        sys.stderr.write(f"penstock node: {error.message}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
