"""A real Prometheus with the alert rules of ops/observe, in which all times pass ten times as fast."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import yaml
from fakes.waiting import wait_until
from faults.tools.redis_process import free_port

RULES = Path(__file__).parents[3] / "ops/observe/alerts.yml"
FASTER = 10
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_DURATION = re.compile(r"\b(\d+)([smhd])\b")
_TARGET = re.compile(r"vector\((\d+)\)")
"""A longest wait in seconds. The nodes of a drill admit a tenth as well."""


def faster(text: str) -> str:
    """Return an expression, or a `for`, whose durations are a tenth; at least a second."""
    return _DURATION.sub(lambda found: f"{max(1, int(found[1]) * _UNITS[found[2]] // FASTER)}s", text)


def fast_rules() -> dict[str, Any]:
    """Return the rules. Names of recorded series, and texts for people, stay as they are."""
    rules: dict[str, Any] = yaml.safe_load(RULES.read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            if "seconds" in rule.get("record", "") and (target := _TARGET.fullmatch(str(rule["expr"]))):
                rule["expr"] = f"vector({float(target[1]) / FASTER:g})"
                continue
            # A colon before a duration belongs to a recorded name, such as ratio_rate5m.
            rule["expr"] = re.sub(r"\[[^\]]*\]|\boffset \w+", lambda found: faster(found[0]), str(rule["expr"]))
            rule |= {"for": faster(rule["for"])} if "for" in rule else {}
            rule |= {"keep_firing_for": faster(rule["keep_firing_for"])} if "keep_firing_for" in rule else {}
    return rules


def prometheus_program() -> str | None:
    """Return the path of Prometheus, or None where it is not installed."""
    return shutil.which("prometheus")


class FastAlerts:
    """Watches which alerts fire, from its start on."""

    def __init__(self, folder: Path, targets: Mapping[str, Sequence[str]]) -> None:
        """`targets`: the addresses to scrape, by job."""
        self._folder = folder
        self._targets = targets
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._began_s = 0.0
        self.fired: dict[str, float] = {}
        """Name of an alert → seconds after `begin` at which it was first seen to fire."""

    def begin(self) -> None:
        """Let the times count from now on."""
        self._began_s, self.fired = time.monotonic(), {}

    def look(self) -> None:
        """Note the alerts that fire now."""
        with suppress(httpx.TransportError):
            answer = httpx.get(f"http://127.0.0.1:{self._port}/api/v1/alerts", timeout=5)
            for alert in answer.json()["data"]["alerts"]:
                if alert["state"] == "firing":
                    self.fired.setdefault(alert["labels"]["alertname"], round(time.monotonic() - self._began_s, 1))

    def __enter__(self) -> Self:
        program = prometheus_program()
        assert program is not None, "apt-get install prometheus"
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / "alerts.yml").write_text(yaml.safe_dump(fast_rules()))
        config = {
            # A scrape may take as long as the interval: a busy machine is no target that is down.
            "global": {"scrape_interval": "2s", "scrape_timeout": "2s", "evaluation_interval": "1s"},
            "rule_files": [str(self._folder / "alerts.yml")],
            "scrape_configs": [
                {"job_name": name, "static_configs": [{"targets": [*addresses]}]}
                for name, addresses in self._targets.items()
            ],
        }
        (self._folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        words = [f"--config.file={self._folder / 'prometheus.yml'}", f"--storage.tsdb.path={self._folder / 'data'}"]
        words.append(f"--web.listen-address=127.0.0.1:{self._port}")
        with (self._folder / "prometheus.log").open("w") as log:
            self._process = subprocess.Popen([program, *words], stdout=log, stderr=log)
        wait_until(self._has_scraped, what=lambda: (self._folder / "prometheus.log").read_text()[-2000:])
        self.begin()
        return self

    def _has_scraped(self) -> bool:
        """Whether every target has answered twice: a fault may begin at once, and counters need a value before it."""
        with suppress(httpx.TransportError):
            query = {"query": "count(sum_over_time(up[1m]) > 1.5)"}
            answer = httpx.get(f"http://127.0.0.1:{self._port}/api/v1/query", params=query, timeout=5)
            found = answer.json()["data"]["result"] if answer.is_success else []
            return bool(found) and int(found[0]["value"][1]) == sum(map(len, self._targets.values()))
        return False

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
