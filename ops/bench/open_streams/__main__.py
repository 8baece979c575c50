"""`… -m bench.open_streams` measures thousands of open streams through one gateway process, and slow readers.

The node has no engine, but publishes through the queue's own scripts. The reader is a compiled program. The gateway has
a core for itself; Redis, the node and the reader share the others. `--gateways` measures several versions by turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import shlex
import sys
from itertools import product
from pathlib import Path

from bench.machine import describe, revision
from bench.open_streams.measure import Setup, measure_rates, measure_stopped
from bench.open_streams.node import serve
from bench.open_streams.processes import SSE, TRANSPORTS, WEBSOCKET, Answer, Cores
from bench.open_streams.report import Scene, report
from bench.report import write_raw

RESULTS = Path(__file__).parents[1] / "results"
SPARE_FILES = 500


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(prog="bench.open_streams", description=__doc__)
    parser.add_argument("--streams", type=int, default=5000)
    parser.add_argument("--rates", type=float, nargs="*", default=[20_000], help="events per second")
    parser.add_argument("--direct-rates", type=float, nargs="*", default=[20_000, 40_000], help="without the script")
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=TRANSPORTS)
    parser.add_argument("--socket-rates", type=float, nargs="*", default=[10_000, 20_000], help="rates of WebSockets")
    parser.add_argument("--socket-direct-rates", type=float, nargs="*", default=[20_000], help="without the script")
    parser.add_argument("--readers", type=int, default=500, help="streams beside which some readers stop; 0: none")
    parser.add_argument("--stopped", type=int, default=50, help="readers that stop")
    parser.add_argument("--stopped-rate", type=float, default=10_000, help="events per second beside them")
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--batch", type=int, default=25, help="streams of one emit call")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--gateways", nargs="+", default=[sys.executable], help="Pythons with the gateways' versions")
    parser.add_argument("--keepers", nargs="+", choices=("off", "on"), default=["off"], help="gateways with a keeper")
    parser.add_argument("--no-pin", dest="pinned", action="store_false", help="let all processes use all cores")
    parser.add_argument("--write", action="store_true", help="write results/open_streams.md")
    return parser.parse_args(arguments)


def raise_open_files(num_streams: int) -> None:
    """Allow as many open files as the streams need. Raises ValueError beyond the system's limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, num_streams + SPARE_FILES), hard))


def run(options: argparse.Namespace) -> tuple[list[Answer], list[Answer]]:
    """Measure each gateway in each turn; print each measurement as it comes."""
    cores = Cores.of_this_machine(pinned=options.pinned)
    setup = Setup(options.seconds, options.batch, cores)
    loads, stops = list[Answer](), list[Answer]()
    for turn in range(options.turns):
        for gateway, keeper in product(options.gateways, options.keepers):
            keeps = keeper == "on"
            of_run = {"gateway": name_of(gateway) + (" with a keeper" if keeps else ""), "turn": turn}
            for transport, rates in rates_of(options).items():
                found = measure_rates(gateway, options.streams, *rates, setup, transport, keeps=keeps)
                loads += [{**of_run, **one} for one in found]
                print(json.dumps(loads[-len(found) :]), flush=True)
            if options.readers:
                among = options.readers, options.stopped, options.stopped_rate
                stops.append({**of_run, **measure_stopped(gateway, *among, setup)})
                print(json.dumps(stops[-1]), flush=True)
    return loads, stops


def rates_of(options: argparse.Namespace) -> dict[str, tuple[list[float], list[float]]]:
    """Return the rates to measure of each transport: by the script, and without it."""
    rates = {SSE: (options.rates, options.direct_rates), WEBSOCKET: (options.socket_rates, options.socket_direct_rates)}
    return {transport: of for transport, of in rates.items() if transport in options.transports and any(of)}


def name_of(gateway: str) -> str:
    """Return the name of a gateway's version: the folder that holds its virtual environment."""
    return "this version" if gateway == sys.executable else gateway.split("/.venv/")[0].rpartition("/")[2]


def main() -> None:
    """Run the measurements, or the node if that is asked for."""
    if sys.argv[1:2] == ["node"]:
        asyncio.run(serve(sys.argv[2], int(sys.argv[3])))
        return
    options = parse(sys.argv[1:])
    raise_open_files(max(options.streams, options.readers))
    loads, stops = run(options)
    scene = Scene(machine=describe(), revision=revision(), command=shlex.join(sys.argv[1:]), pinned=options.pinned)
    lines = report(scene, loads, stops)
    print("\n".join(lines))
    if options.write:
        (RESULTS / "open_streams.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
        found = {"machine": scene.machine, "revision": scene.revision, "loads": loads, "stopped": stops}
        write_raw("open_streams", found)


if __name__ == "__main__":
    main()
