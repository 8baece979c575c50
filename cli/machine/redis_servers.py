"""What `penstock doctor` says of the other servers of a Redis: its replicas and Sentinels.

What a replica lacks is met only after a fail-over, so each server is asked, and compared with the primary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.cli.machine.check import Check
from penstock.queue.broker.server_facts import SETTINGS, SentinelFacts, ServerFacts, ask_servers

MAX_LAG_S = 1
MAX_LAG_BYTES = 1 << 20
"""More of a replica's lag is named: a fail-over now would lose it."""
MIN_SENTINELS = 3
_SUBJECT = "servers"
_SAVE = "then ACL SAVE there (ops/acl)"


def judge_servers(primary: ServerFacts, replicas: Sequence[ServerFacts]) -> Iterator[Check]:
    """Yield how each replica differs from the primary, and what the primary itself lacks for a fail-over."""
    yield from _own_checks(primary, "primary")
    for one in replicas:
        if one.problem:
            advice = f"give it the users of the primary, which Redis does not replicate: ACL SETUSER, {_SAVE}"
            yield Check("warn", _SUBJECT, f"replica {one.name} cannot be asked: {one.problem}", advice)
            continue
        found = [*_own_checks(one, "replica"), *_differences(primary, one), *_lag(one)]
        yield from found or [Check("ok", _SUBJECT, f"replica {one.name}: users, version and settings as the primary's")]


def _own_checks(server: ServerFacts, role: str) -> Iterator[Check]:
    if len(server.users) > 1 and not server.settings.get("aclfile"):
        advice = "name a file (aclfile in its configuration) and restart it, or its users end with its process"
        yield Check("warn", _SUBJECT, f"{role} {server.name}: it has users and no aclfile", advice)
    if " off " in server.users.get("default", "") and not server.settings.get("masteruser"):
        advice = "CONFIG SET masteruser replica, CONFIG SET masterauth PASSWORD, CONFIG REWRITE (ops/acl)"
        finding = f"{role} {server.name}: no masteruser, so it cannot follow another primary after a fail-over"
        yield Check("warn", _SUBJECT, finding, advice)


def _differences(primary: ServerFacts, other: ServerFacts) -> Iterator[Check]:
    named = f"replica {other.name}"
    if missing := sorted(primary.users.keys() - other.users.keys()):
        finding = f"{named} lacks users of the primary: {', '.join(missing)}"
        yield Check("warn", _SUBJECT, finding, f"make them there: ACL SETUSER NAME RULES, {_SAVE}")
    differing = [name for name in primary.users.keys() & other.users.keys() if primary.users[name] != other.users[name]]
    if differing:
        finding = f"{named}: passwords or rights of {', '.join(sorted(differing))} differ from the primary's"
        yield Check(
            "warn", _SUBJECT, finding, f"after a fail-over they are refused; make the change there too, {_SAVE}"
        )
    if extra := sorted(other.users.keys() - primary.users.keys()):
        finding = f"{named} has users that the primary lacks: {', '.join(extra)}"
        yield Check("warn", _SUBJECT, finding, f"delete them there (ACL DELUSER NAME), {_SAVE}")
    if primary.version != other.version:
        finding = f"{named} has version {other.version}, and the primary {primary.version}"
        yield Check("warn", _SUBJECT, finding, "upgrade the older one; fail over only to the newer one")
    for name in SETTINGS:
        mine, theirs = primary.settings.get(name, ""), other.settings.get(name, "")
        # What `_own_checks` says of an empty one is enough.
        if mine != theirs and theirs and mine:
            advice = (
                f"after a fail-over it counts: CONFIG SET {name} {mine}, CONFIG REWRITE there, unless it is meant so"
            )
            yield Check("warn", _SUBJECT, f"{named}: {name} is {theirs}, and on the primary {mine}", advice)


def _lag(server: ServerFacts) -> Iterator[Check]:
    if not server.is_linked:
        advice = "read its log: often masteruser or masterauth is wrong; a fail-over to it would lose what it lacks"
        yield Check("warn", _SUBJECT, f"replica {server.name} is not connected to its primary", advice)
    elif server.lag_s > MAX_LAG_S or server.lag_bytes > MAX_LAG_BYTES:
        finding = f"replica {server.name} is {server.lag_s} s and {server.lag_bytes / 2**20:.1f} MiB behind"
        yield Check("warn", _SUBJECT, finding, "wait before a planned fail-over: what it lacks would be lost")


def judge_sentinels(found: Sequence[SentinelFacts], primary: str) -> Iterator[Check]:
    """Yield which Sentinels do not answer or name another primary, and whether there are enough."""
    for one in found:
        if one.problem:
            advice = "start it, or correct its address, or sentinel_username and sentinel_password of the URL"
            yield Check("warn", "Sentinel", f"{one.name} cannot be asked: {one.problem}", advice)
        elif one.primary != primary:
            finding = f"{one.name} names the primary {one.primary or 'of none'}, and others {primary}"
            yield Check(
                "warn", "Sentinel", finding, "it may be cut off from the others: look at its network and its log"
            )
    if len(found) < MIN_SENTINELS:
        advice = "use three on different machines; fewer cannot agree on a fail-over when one is lost"
        yield Check("warn", "Sentinel", f"the URL names {len(found)}", advice)
    elif all(not one.problem and one.primary == primary for one in found):
        yield Check("ok", "Sentinel", f"{len(found)} name the primary {primary}")


async def check_servers(url: str) -> list[Check]:
    """Ask the servers of the Redis at `url`; nothing where it has neither replicas nor Sentinels."""
    found = await ask_servers(url)
    checks = [] if found.sentinels is None else [*judge_sentinels(found.sentinels, found.primary_name)]
    if found.is_replica:
        checks.append(Check("warn", _SUBJECT, "the URL leads to a replica", "name the primary, or Sentinel"))
    if found.lacks_rights:
        finding = "replicas are not compared: this user may not read users and settings"
        checks.append(Check("ok", _SUBJECT, finding, "run it with the URL of the user operator (ops/acl)"))
    if found.problem:
        checks.append(Check("warn", _SUBJECT, f"the primary cannot be asked: {found.problem}"))
    if found.primary is not None:
        checks += judge_servers(found.primary, found.replicas)
    return checks
