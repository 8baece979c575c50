"""aider without a terminal, on a model that says what the prompt tells it to say. It edits by blocks of text."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from clients.python.checks import API, KEY, check, main

_MODEL = "openai/scripted"
_OPTIONS = (
    *("--yes-always", "--no-git", "--no-check-update", "--no-show-model-warnings", "--no-analytics", "--no-pretty"),
    *("--no-suggest-shell-commands", "--no-detect-urls", "--no-gitignore", "--map-tokens", "0"),
)
_TIMEOUT_S = 120


@contextmanager
def folder_with_rivers() -> Iterator[Path]:
    """Yield a folder with one file, and remove it at the end."""
    with tempfile.TemporaryDirectory(prefix="aider") as folder:
        (Path(folder) / "rivers.txt").write_text("Oder\nNile\n")
        yield Path(folder)


def said_by_aider(folder: Path, *words: str, answers: tuple[str, ...]) -> str:
    """Run aider in a folder and return what it printed."""
    command = [str(Path(sys.executable).parent / "aider"), "--model", _MODEL, *_OPTIONS, *words]
    message = f"Do this. SCRIPT: {json.dumps(answers)}"
    env = {**os.environ, "OPENAI_API_BASE": API, "OPENAI_API_KEY": KEY, "HOME": str(folder)}
    done = subprocess.run(
        [*command, "--message", message, "rivers.txt"],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout[-2000:]
    return done.stdout


def edit(before: str, after: str) -> str:
    """Return an answer with an edit in aider's form."""
    return f"I change it.\n\nrivers.txt\n```\n<<<<<<< SEARCH\n{before}\n=======\n{after}\n>>>>>>> REPLACE\n```\n"


@check
def file_is_edited_by_a_block_streamed_and_whole() -> None:
    for words in ((), ("--no-stream",)):
        with folder_with_rivers() as folder:
            said = said_by_aider(folder, "--edit-format", "diff", *words, answers=(edit("Oder", "Oder: 840 km"),))
            assert (folder / "rivers.txt").read_text() == "Oder: 840 km\nNile\n", said


@check
def block_that_does_not_fit_is_sent_back_and_corrected() -> None:
    with folder_with_rivers() as folder:
        # It sends messages of its own as the assistant's, so the second answer counts as a later one.
        answers = (edit("Odra", "x"), *[edit("Nile", "Nile: 6650 km")] * 5)
        said = said_by_aider(folder, "--edit-format", "diff", answers=answers)
        assert (folder / "rivers.txt").read_text() == "Oder\nNile: 6650 km\n", said


@check
def whole_file_is_written() -> None:
    with folder_with_rivers() as folder:
        said = said_by_aider(folder, "--edit-format", "whole", answers=("rivers.txt\n```\nElbe\n```\n",))
        assert (folder / "rivers.txt").read_text() == "Elbe\n", said


if __name__ == "__main__":
    main("aider-chat")
