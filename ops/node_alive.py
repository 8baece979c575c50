"""Healthcheck of a node's container: exits with 0 when its node serves and answers. It asks only the node, not Redis.

An unreachable Redis is no reason to restart nodes: they keep their streams' tokens and continue when it is back.
"""

from __future__ import annotations

import json
import sys

from penstock.gpu_node.service.liveness import MAX_HEARTBEAT_AGE_S, states_of
from penstock.gpu_node.settings import NodeSettings


def main() -> int:
    """Print the nodes' answers, which Docker and Kubernetes store with the check's result."""
    name = NodeSettings.load(model="any", redis_url="any").name
    states = states_of(name)
    sys.stdout.write(json.dumps(states) if states else f"no node called {name} serves in this container, or it hangs\n")
    return 0 if any(state["heartbeat_age_s"] < MAX_HEARTBEAT_AGE_S for state in states) else 1


if __name__ == "__main__":
    sys.exit(main())
