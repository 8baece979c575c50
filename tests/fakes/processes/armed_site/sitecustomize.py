"""Kills gateways that have a keeper at crash points, where this folder is in PYTHONPATH.

FAULTS_OF_GATEWAYS="between|ring and commit|3;after|put|1": the first gateway is killed the third time that it is at its
point, the second one when a slot has its first bytes, before they are written. An empty fault kills none.
FAULTS_COUNTED is a file that grows by a byte for each gateway. What follows `repeat;` is the fault of all gateways.
"""

import os
import signal


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _own_fault() -> str:
    faults = os.environ["FAULTS_OF_GATEWAYS"].split(";")
    if faults[0] == "repeat":
        return faults[1]
    descriptor = os.open(os.environ["FAULTS_COUNTED"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    number = os.fstat(descriptor).st_size
    os.write(descriptor, b".")
    os.close(descriptor)
    return faults[number] if number < len(faults) else ""


def _arm(fault: str) -> None:
    from penstock.gateway.kept.slots import AnswerSlot, Slots
    from penstock.runtime import crash_points

    when, what, count = fault.split("|")
    times_left = int(count)

    def point(at: str, name: str) -> None:
        nonlocal times_left
        if (at, name) == (when, what):
            times_left -= 1
            if times_left == 0:
                _kill()

    crash_points.point = point
    put, init = AnswerSlot.put, Slots.__init__

    def put_and_tell(slot: AnswerSlot, data: bytes, num_waiting: int) -> bool:
        is_put = put(slot, data, num_waiting)
        point("after", "put")
        return is_put

    class ArmedWords:
        """The numbers that count small parts. A part's second store is that of an even number's place."""

        def __init__(self, words: memoryview) -> None:
            self._words = words

        def __getitem__(self, word: int) -> int:
            return self._words[word]

        def __setitem__(self, word: int, number: int) -> None:
            point("within" if word % 2 == 0 else "before", "count of a small part")
            self._words[word] = number
            if word % 2 == 0:
                point("after", "count of a small part")

    def init_and_arm(slots: Slots, descriptor: int, count: int) -> None:
        init(slots, descriptor, count)
        slots._words = ArmedWords(slots._words)  # type: ignore[assignment]

    AnswerSlot.put = put_and_tell  # type: ignore[method-assign]
    Slots.__init__ = init_and_arm  # type: ignore[method-assign]


if "PENSTOCK_GATEWAY_KEEPER" in os.environ and "FAULTS_OF_GATEWAYS" in os.environ and (_fault := _own_fault()):
    _arm(_fault)
