"""Gateways and reading clients as processes; for nodes see tests/fakes/processes/node_process.py."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from fakes.processes.child_process import ChildProcess

READER = str(Path(__file__).parent / "reader.py")


class GatewayProcess(ChildProcess):
    """`penstock gateway` on a free port."""

    url = ""

    def __init__(self, redis_url: str, *, dies: str = "", **settings: Any) -> None:
        env = {f"PENSTOCK_GATEWAY_{name.upper()}": str(value) for name, value in {"port": 0, **settings}.items()}
        env |= {"PENSTOCK_REDIS_URL": redis_url, "PENSTOCK_GATEWAY_PROGRESS": "json"}
        super().__init__(["penstock", "gateway"], env, dies=dies)

    def wait_ready(self) -> Self:
        """Wait until it listens on `url`."""
        self.url = self.wait_event("ready")["url"]
        return self


class ReaderProcess(ChildProcess):
    """A client process that submits jobs (or attaches to them) and prints each chunk that it reads; see reader.py."""

    def __init__(self, redis_url: str, jobs: Sequence[dict[str, Any]], *, dies: str = "", **settings: Any) -> None:
        env = {f"PENSTOCK_CLIENT_{name.upper()}": str(value) for name, value in settings.items()}
        env |= {"PENSTOCK_REDIS_URL": redis_url, "READER_JOBS": json.dumps(jobs)}
        super().__init__([READER], env, dies=dies)
