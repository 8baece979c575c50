"""Build the site: `PYTHONPATH=ops .venv/bin/python -m docs_site [FOLDER]`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from docs_site.links import broken_links
from docs_site.pages import ROOT, write_sources

SITE = ROOT / "build/site"
SHIM = "https://unpkg.com/iframe-worker/shim"
VENDORED = Path(__file__).parent / "vendor/iframe-worker.js"


def load_search_from_here(html: Path) -> None:
    """Replace the one address of the theme that a browser would fetch: a worker for pages that are opened as files."""
    script = html / "assets" / VENDORED.name
    shutil.copyfile(VENDORED, script)
    for page in html.rglob("*.html"):
        text = page.read_text()
        if SHIM in text:
            page.write_text(text.replace(SHIM, os.path.relpath(script, page.parent)))


def main() -> int:
    """Write sources, build, and check links. Return 1 if a link leads nowhere."""
    folder = Path(sys.argv[1]).absolute() if sys.argv[1:] else SITE
    write_sources(folder)
    words = ("-m", "zensical", "build", "--clean", "--strict", "--config-file", str(folder / "zensical.toml"))
    subprocess.run([sys.executable, *words], cwd=folder, check=True)
    load_search_from_here(folder / "html")
    broken = broken_links(folder / "html")
    for line in broken:
        print(line, file=sys.stderr)
    print(folder / "html/index.html")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
