"""`python -m clients [NAME…]`: run official clients and load tools against `penstock serve`.

It prints a table and the releases that are newer than the pinned ones, and exits with the number of clients that
failed. `--page` writes the results into docs/CLIENTS.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from contextlib import ExitStack

from clients import newer, page
from clients.catalog import BY_NAME, CLIENTS, Client
from clients.running import Report, run_client
from clients.server import Server, encoder_server, running_server

from penstock.contract.tool_formats import BY_NAME as BY_FORMAT


def main() -> int:
    """Run the named clients, or all of them. Return how many failed."""
    parser = argparse.ArgumentParser(prog="make clients", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(BY_NAME)}")
    parser.add_argument("--page", action="store_true", help="write the results into docs/CLIENTS.md")
    parser.add_argument("--record", action="store_true", help="keep the clients' requests in build/clients/recorded/")
    parser.add_argument("--newer", action="store_true", help="only report newer releases; run no client")
    parser.add_argument("--format", default="hermes", choices=sorted(BY_FORMAT), help="of the scripted model's calls")
    parser.add_argument("--told", action="store_true", help="the demo model keeps its template, which takes no tools")
    given = parser.parse_args()
    if unknown := [name for name in given.names if name not in BY_NAME]:
        parser.error(f"unknown: {', '.join(unknown)}; known are {', '.join(BY_NAME)}")
    chosen = [BY_NAME[name] for name in given.names] or CLIENTS
    if given.newer:
        _show_newer(chosen)
        return 0
    print(f"{'client':16}{'version':12}{'checks':>8}{'seconds':>9}")
    with ExitStack() as stack:
        servers = dict[bool, Server]()
        if any(client.is_for_encoders for client in chosen):
            servers[True] = stack.enter_context(encoder_server())
        if not all(client.is_scripted or client.is_for_encoders for client in chosen):
            servers[False] = stack.enter_context(running_server(tells_tools=given.told))
        options = {"records": given.record, "tool_format": given.format}
        reports = [_shown(run_client(one, servers.get(one.is_for_encoders), **options)) for one in chosen]
    if given.page:
        page.write(reports)
    _show_newer(chosen)
    return sum(not report.passed for report in reports)


def _show_newer(clients: Iterable[Client]) -> None:
    print("newer releases:", *newer.lines_of(clients), sep="\n  ")


def _shown(report: Report) -> Report:
    version = next(iter(report.versions.values()), "")
    checks = f"{report.num_passed}/{report.num_checks}"
    print(f"{report.client.name:16}{version:12}{checks:>8}{report.seconds:9.1f}", flush=True)
    for check, problem in report.problems.items():
        print(f"  FAILED: {check}\n{problem}", file=sys.stderr, flush=True)
    return report


if __name__ == "__main__":
    sys.exit(main())
