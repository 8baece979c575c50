"""Drills of an operator: a restored backup, and the replacement of nodes and gateways under load."""

from __future__ import annotations

import inspect
import re
import ssl
from pathlib import Path

import pytest
from faults.drills import (
    DRILLS,
    Certified,
    Replaced,
    Restored,
    Rotated,
    certificates,
    redis_with_tls,
    replace,
    restore,
    rotate,
)
from faults.proxies import PROXIES, ProxyName, behind_proxy, program_of
from faults.states import FAULTS, drill
from faults.tools.fast_alerts import fast_rules
from faults.tools.redis_process import find_libfaketime

from tests.source_tree import ROOT


async def test_after_a_restored_backup_jobs_run_again_alike_and_later_ones_are_gone(tmp_path: Path) -> None:
    assert await restore(tmp_path) == Restored(
        ended_before="succeeded",
        ended_after="succeeded",
        ended_after_runs_again_alike=True,
        accepted_after="gone",
        repeated_with_its_key="another job",
        old_api_key=200,
        new_api_key=401,
    )


@pytest.mark.slow  # test_node_faults.py restarts nodes one after the other every time.
async def test_nodes_and_gateways_are_replaced_under_load_without_a_lost_token(tmp_path: Path) -> None:
    assert await replace(tmp_path, num_jobs=8) == Replaced(accepted=8, exact=8, replaced=4)


@pytest.mark.slow  # It is the replacement above with another password.
async def test_a_password_of_redis_is_rotated_under_load_and_holds_after_a_failover(tmp_path: Path) -> None:
    jobs = Replaced(accepted=8, exact=8, replaced=4)
    assert await rotate(tmp_path, num_jobs=8) == Rotated(jobs, old_password_works=False, works_after_failover=True)


@pytest.mark.slow  # It restarts four gateways.
@pytest.mark.parametrize("name", PROXIES)
async def test_streams_through_a_proxy_survive_stops_and_kills_of_gateways(tmp_path: Path, name: ProxyName) -> None:
    if program_of(name) is None:
        pytest.skip(f"apt-get install {name}")
    outcome = await behind_proxy(name, tmp_path, num_streams=8)
    assert outcome.whole == 8
    assert outcome.broken, "some streams were cut off"
    # Caddy 2.6 passes no POST on to another gateway. It may answer 502 until it knows that a gateway is gone.
    assert outcome.bad_gateways == 0 or name == "caddy"


@pytest.mark.slow  # It needs a Redis with TLS, which the embedded one has not.
async def test_a_certificate_of_redis_is_rotated_under_load_without_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The session shares one context, which would keep every authority that it ever read.
    monkeypatch.setattr(ssl, "create_default_context", inspect.unwrap(ssl.create_default_context))
    if redis_with_tls() is None:
        pytest.skip("no Redis with TLS: apt-get install redis-server")
    assert await certificates(tmp_path, num_jobs=8) == Certified(8, 8, restarted=0, old_authority_works=False)


def test_the_runbook_has_a_row_for_each_drill_and_a_drill_for_each_row() -> None:
    section = (ROOT / "ops/RUNBOOK.md").read_text().split("\n## Drills\n", 1)[1].split("\n## ", 1)[0]
    rows = re.findall(r"^\| (`[^|]+) \| [^|]+ \| \*([^*]+)\*", section, re.MULTILINE)
    assert {name for names, _ in rows for name in re.findall(r"`(\w+)`", names)} == set(DRILLS)
    headings = re.findall(r"^## (.+)$", (ROOT / "ops/RUNBOOK.md").read_text(), re.MULTILINE)
    assert {heading for _, heading in rows} <= set(headings)


@pytest.mark.slow  # Each takes half a minute to four; test_redis_states.py has the states every time.
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FAULTS)
async def test_streams_end_whole_in_each_state_and_the_alerts_that_tell_of_it_fire_alone(
    tmp_path: Path, name: str
) -> None:
    if FAULTS[name].clock_s and find_libfaketime() is None:
        pytest.skip("libfaketime is not installed (Debian's libfaketime)")
    seen = await drill(name, tmp_path, num_streams=4)
    assert (seen.whole, seen.lost) == (4, 0)
    assert set(seen.named_by) >= set(FAULTS[name].said)
    assert (seen.missing_alerts, seen.wrong_alerts) == ([], [])


def test_the_rules_of_a_drill_are_ten_times_as_fast() -> None:
    rules = {rule.get("alert"): rule for group in fast_rules()["groups"] for rule in group["rules"]}
    assert rules["PenstockBacklog"]["for"] == "30s"
    targets = [
        rule for group in fast_rules()["groups"] for rule in group["rules"] if "target_wait" in str(rule.get("record"))
    ]
    assert [rule["expr"] for rule in targets] == ["vector(1)", "vector(6)", "vector(90)"]
    texts = [rule["expr"] for rule in rules.values()]
    assert not any(re.search(r"\[\d+[mhd]\]", text) for text in texts)
