"""A model served by `penstock serve`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from fakes.processes.child_process import ChildProcess
from fakes.processes.python_process import PythonProcess

TOOL_TEMPLATE = """\
{%- if tools %}<|im_start|>system
You call functions. These are there, one in a line:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Say a call so:
<tool_call>
{"name": "the function", "arguments": {}}
</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or "" }}
{%- for call in message.tool_calls or () %}<tool_call>
{{ call.function | tojson }}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}<|im_start|>assistant
"""
"""A chat template with tools, for the demo model, whose own takes none."""


@contextmanager
def served(
    model: Path,
    log: IO[str] | None = None,
    *,
    redis_url: str | None = None,
    runtime_dir: Path | None = None,
    **settings: object,
) -> Iterator[str]:
    """Serve and yield the gateway's URL. The node's settings are given by field name. The log goes to stderr or a file.

    Each call has its own Redis, unless one is given, and its own PENSTOCK_RUNTIME_DIR. The node computes on one thread
    by default.
    """
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_NODE_")}
    words = (
        "-m",
        "penstock",
        "serve",
        str(model),
        "--port",
        "0",
        *(("--ephemeral",) if redis_url is None else ("--redis-url", redis_url)),
    )
    env = clean | {
        f"PENSTOCK_NODE_{name.upper()}": str(value) for name, value in ({"num_threads": 1} | settings).items()
    }
    with (
        tempfile.TemporaryDirectory(prefix="serve") as own_dir,
        _python(*words, env=env | {"PENSTOCK_RUNTIME_DIR": str(runtime_dir or own_dir)}, log=log) as process,
    ):
        assert process.stdout is not None
        try:
            lines = iter(process.stdout)
            yield next(match[1] for line in lines if (match := re.search(r"at (http://\S+)/v1", line)))
        finally:
            process.terminate()


def _python(*words: str, env: Mapping[str, str], log: IO[str] | None) -> subprocess.Popen[str]:
    """Start `python <words>`, as a fork in a session of tests."""
    if ChildProcess.fork_server is not None:
        return PythonProcess(*words, env=env, stderr=log)
    return subprocess.Popen([sys.executable, *words], env=env, stdout=subprocess.PIPE, stderr=log, text=True)
