"""Node processes for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fakes.processes.child_process import ChildProcess

REFERENCE_NODE = str(Path(__file__).parent / "reference_node.py")


class NodeProcess(ChildProcess):
    """`penstock node`, or the reference node if no model is named. Settings are given by field name.

    It computes on one thread by default: more would compete with other tests for cores.
    """

    def __init__(
        self,
        redis_url: str,
        *,
        step_s: float = 0.0,
        tokens_per_step: int = 1,
        error_share: float = 0.0,
        differs: bool = False,
        dies: str = "",
        tokenizer_hangs: bool = False,
        share: float | None = None,
        **settings: Any,
    ) -> None:
        """share: what background work gets beside foreground work of other reference nodes; None: it does not wait."""
        if "model" in settings and "reserved_cores" not in settings:
            settings = {"num_threads": 1, **settings}
        command = ["penstock", "node"] if "model" in settings else [REFERENCE_NODE]
        env = {f"PENSTOCK_NODE_{name.upper()}": str(value) for name, value in settings.items()}
        env |= {"PENSTOCK_REDIS_URL": redis_url, "PENSTOCK_NODE_PROGRESS": "json", "REFERENCE_STEP_S": str(step_s)}
        env |= {"REFERENCE_TOKENS_PER_STEP": str(tokens_per_step)} if tokens_per_step > 1 else {}
        env |= {"REFERENCE_TOKENIZER_HANGS": "1"} if tokenizer_hangs else {}
        env |= {"REFERENCE_ERROR_SHARE": str(error_share)} if error_share else {}
        env |= {"REFERENCE_DIFFERS": "1"} if differs else {}
        env |= {} if share is None else {"REFERENCE_SHARE": str(share)}
        self.imports = ("penstock.gpu_node.model.loading.load",) if "model" in settings else ()
        super().__init__(command, env, dies=dies)
