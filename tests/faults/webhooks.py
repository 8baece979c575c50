"""`python -m faults.webhooks`: ends of jobs are told to failing receivers, while gateways are killed.

Each end must arrive at least once, each signature must be valid, and nothing may reach a forbidden address. It prints
what it measured and what was violated.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

from faults.tools.redis_process import RedisProcess
from faults.tools.report import Measurement, record
from faults.tools.webhook_kills import run_with_kills


def main() -> None:
    """Run the campaign. The exit status is 1 if something was violated."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=10_000, help="jobs whose ends are told")
    parser.add_argument("--kills", type=int, default=20, help="kills of a gateway")
    parser.add_argument("--seed", type=int, default=0, help="of the receivers' behavior")
    given = parser.parse_args()
    begun_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, RedisProcess(Path(folder)) as server:
        report = asyncio.run(run_with_kills(server.url, num_jobs=given.jobs, num_kills=given.kills, seed=given.seed))
    took_s = time.monotonic() - begun_s
    measured: dict[str, Measurement] = {
        "events": report.num_events,
        "requests": report.num_requests,
        "accepted again": report.num_repeated,
        "kills": report.num_kills,
        "seconds": round(took_s),
    }
    print(measured)
    for violation in report.violations[:100]:
        print(violation)
    if report.violations:
        sys.exit(1)
    record("Webhooks", "gateways killed, receivers that fail", measured)


if __name__ == "__main__":
    main()
