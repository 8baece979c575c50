"""The keeper replaces itself by that of another release, and its connections stay (`exec` keeps descriptors).

It first runs the command of the new release to see that it starts, and which version its slots have. Then the gateway
leaves, and this process becomes the keeper of the new release, which starts the next gateway. If the slots have another
version, the gateway drains instead, because no successor can go on with its answers.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import NoReturn, Self

from penstock.gateway.kept.slots import VERSION

_log = logging.getLogger(__package__)

HANDED_VARIABLE = "PENSTOCK_GATEWAY_HANDED"
"""Environment variable of a keeper that goes on with another one's connections: the descriptor that describes them."""
CHECK_VARIABLE = "PENSTOCK_GATEWAY_CHECK"
"""Environment variable of a command that only checks its settings and prints the version of its slots."""
CHECK_TIMEOUT_S = 60.0
_MAX_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class HandedKeeper:
    """What a keeper hands to the release that replaces it. All but the counts and times are descriptors."""

    listeners: Sequence[int]
    slots: int
    num_slots: int
    kept: Mapping[int, int]
    """Slot → descriptor of its connection."""
    ended_ns: int
    """When the gateway ended (CLOCK_MONOTONIC)."""

    @classmethod
    def of_environment(cls) -> Self | None:
        """Return what the process before this `exec` has handed over, once."""
        text = os.environ.pop(HANDED_VARIABLE, "")
        if not text:
            return None
        descriptor = int(text)
        fields = json.loads(os.pread(descriptor, _MAX_BYTES, 0))
        os.close(descriptor)
        kept = {int(slot): connection for slot, connection in fields.pop("kept").items()}
        handed = cls(**fields, kept=kept)
        for inherited in (*handed.listeners, handed.slots, *kept.values()):
            os.set_inheritable(inherited, False)
        return handed


def own_command() -> list[str]:
    """Return the command of this process, as it would start now: a link in its path may lead to another release."""
    words = sys.orig_argv[1:]
    is_program = os.path.isfile(words[0]) and os.access(words[0], os.X_OK)
    return words if is_program else [sys.executable, *words]


def say_version() -> None:
    """Print what `slot_version_of` reads."""
    print(json.dumps({"slot_version": VERSION}), flush=True)  # noqa: T201


async def slot_version_of(command: Sequence[str]) -> int | None:
    """Return the version of the slots of a keeper's command, or None, and log why, if it does not start."""
    pipe = asyncio.subprocess.PIPE
    env = {**os.environ, CHECK_VARIABLE: "1"}
    output = errors = b""
    try:
        checking = await asyncio.create_subprocess_exec(
            *command, env=env, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe
        )
        try:
            async with asyncio.timeout(CHECK_TIMEOUT_S):
                output, errors = await checking.communicate()
            return int(json.loads(output)["slot_version"])
        finally:
            with suppress(ProcessLookupError):
                checking.kill()
    except (OSError, TimeoutError, ValueError, TypeError, KeyError) as error:
        reason = errors.decode(errors="replace").strip().rpartition("\n")[2] or f"{type(error).__name__} {error}"
        _log.error("the new release does not start, so the gateway goes on", extra={"reason": reason[-500:]})
        return None


def become(command: Sequence[str], handed: HandedKeeper) -> NoReturn:
    """Replace this process by another keeper. Raises OSError if the command cannot be run."""
    described = os.memfd_create("penstock-handed")
    os.pwrite(described, json.dumps(asdict(handed)).encode(), 0)
    inherited = (described, *handed.listeners, handed.slots, *handed.kept.values())
    for descriptor in inherited:
        os.set_inheritable(descriptor, True)
    # Until the next keeper handles it, another SIGHUP must not end the process.
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        os.execvpe(command[0], [*command], {**os.environ, HANDED_VARIABLE: str(described)})
    finally:  # Only where it failed.
        signal.signal(signal.SIGHUP, before)
        for descriptor in inherited:
            os.set_inheritable(descriptor, False)
        os.close(described)
