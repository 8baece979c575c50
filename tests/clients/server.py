"""The server of the runs: `penstock serve` with the demo model and a chat template that takes tools."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from clients.environments import FOLDER
from fakes.served_model import TOOL_TEMPLATE, served
from fixtures.dequantized import dequantized

from penstock.cli.demo_model import demo_model

MODEL = "smollm2"
LOGS = FOLDER / "logs"


@dataclass(frozen=True)
class Server:
    """A running server, and the folder of its model, whose tokenizer load tools read."""

    url: str
    model_folder: Path


@contextmanager
def running_server() -> Iterator[Server]:
    """Start a server, and stop it at the end."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / MODEL
        shutil.copytree(dequantized(demo_model()), folder, copy_function=os.symlink)
        template = folder / "chat_template.jinja"
        template.unlink(missing_ok=True)
        template.write_text(TOOL_TEMPLATE)
        LOGS.mkdir(parents=True, exist_ok=True)
        with (LOGS / "server.log").open("w") as log, served(folder, log) as url:
            yield Server(url, folder)
