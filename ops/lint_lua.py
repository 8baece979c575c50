"""Runs luacheck on the Lua scripts as Redis gets them: each behind what it shares with others. `make lint-lua`.

What only some scripts use is no finding in what they share; what none of them uses is.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib import resources
from pathlib import Path

from penstock.queue.broker.script_text import SHARED_PARTS, shared_text, whole_source

UNUSED = ("(W2", "(W3")
"""Beginnings of what luacheck says of unused names and values."""
CONFIG = Path(__file__).parents[1] / ".luacheckrc"


def findings_of(name: str) -> set[tuple[str, int, str]]:
    """Return file, line and text of each warning of luacheck for one script."""
    own = (resources.files("penstock.queue") / "scripts" / f"{name}.lua").read_text()
    command = ["luacheck", "--config", str(CONFIG), "--formatter", "plain", "--codes", "-"]
    said = subprocess.run(command, input=whole_source(name), capture_output=True, text=True, check=False).stdout
    text = whole_source(name)
    begins = []
    for part, its_text in (*((f"shared/{one}", shared_text(one)) for one in SHARED_PARTS), (name, own)):
        at = text.find(its_text)
        if at >= 0:
            begins.append((text.count("\n", 0, at), part))
    found = set()
    for number, problem in re.findall(r"^stdin:(\d+):\d+: (.*)$", said, re.MULTILINE):
        begin, part = max(one for one in begins if one[0] < int(number))
        found.add((part, int(number) - begin, problem))
    return found


def main() -> None:
    """Print the findings. The exit status is 1 if there are any."""
    if shutil.which("luacheck") is None:
        sys.exit("luacheck is not installed; Debian and Ubuntu have it as `lua-check`")
    scripts = Path(str(resources.files("penstock.queue") / "scripts"))
    names = sorted(path.stem for path in scripts.glob("*.lua"))
    of_each = [findings_of(name) for name in names]
    everywhere = set.intersection(*of_each)
    left = {
        finding
        for found in of_each
        for finding in found
        if finding in everywhere or not finding[0].startswith("shared/") or not finding[2].startswith(UNUSED)
    }
    for part, line, problem in sorted(left):
        print(f"src/penstock/queue/scripts/{part}.lua:{line}: {problem}")
    sys.exit(bool(left))


if __name__ == "__main__":
    main()
