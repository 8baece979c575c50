"""Two releases of this tree behind a link, as `switch_release.sh` leads `/opt/penstock` to one or the other."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from faults.tools.releases import NEXT, ROOT

from penstock import __version__

_PROGRAM = """#!{python}
import os, sys
sys.path.insert(0, {folder!r})
os.environ["PYTHONPATH"] = {folder!r}
from penstock.__main__ import main
main()
"""


class LinkedReleases:
    """Release N, which is this tree, and N+1, which has another version."""

    def __init__(self, folder: Path) -> None:
        self._link = folder / "current"
        self.versions = (__version__, NEXT)
        for version in self.versions:
            to = folder / version
            shutil.copytree(ROOT / "src", to, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
            init = to / "penstock/__init__.py"
            init.write_text(init.read_text().replace(f'__version__ = "{__version__}"', f'__version__ = "{version}"'))
            program = to / "program"
            program.write_text(_PROGRAM.format(python=sys.executable, folder=str(to)))
            program.chmod(0o755)
        self._number = 1
        self.switch()

    def switch(self) -> str:
        """Let the link lead to the other release, and return its version."""
        self._number = 1 - self._number
        version = self.versions[self._number]
        following = self._link.with_name("next")
        following.symlink_to(self._link.parent / version)
        following.rename(self._link)
        return version

    def start(self, *words: str, **how: Any) -> subprocess.Popen[str]:
        """Start a command of the release to which the link leads. `words` begin with `-m penstock`."""
        command = [os.fspath(self._link / "program"), *words[2:]]
        return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **how)
