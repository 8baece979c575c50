"""Two nodes on the same cores: when one of them is killed or stopped, the other one waits no longer than a second."""

from __future__ import annotations

from faults import shared_hosts


async def test_a_node_that_is_killed_or_stopped_holds_up_the_other_for_less_than_a_second() -> None:
    # The seed has each of the four faults.
    assert await shared_hosts.run(shared_hosts.parser().parse_args(["--faults", "4", "--seed", "4"])) == []
