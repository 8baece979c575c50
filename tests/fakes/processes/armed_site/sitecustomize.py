"""Kills gateways that have a keeper at crash points, where this folder is in PYTHONPATH.

FAULTS_OF_GATEWAYS="between|ring and commit|3;after|put|1": the first gateway is killed the third time that it is at its
point, the second one when a slot has its first bytes, before they are written. An empty fault kills none.
FAULTS_COUNTED is a file that grows by a byte for each gateway that starts; one on standby has not started. What follows
`repeat;` is the fault of all gateways.
"""

import mmap
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


def _arm() -> None:
    from penstock.gateway.kept import holder, slots
    from penstock.gateway.kept.slots import AnswerSlot
    from penstock.runtime import crash_points
    from penstock.runtime.kept_sockets import Inherited

    when = what = ""
    times_left = 0
    begin = holder.begin_to_hold

    def begin_with_a_fault(inherited: Inherited) -> None:
        nonlocal when, what, times_left
        begin(inherited)
        if fault := _own_fault():
            when, what, count = fault.split("|")
            times_left = int(count)

    holder.begin_to_hold = begin_with_a_fault

    def point(at: str, name: str) -> None:
        nonlocal times_left
        if (at, name) == (when, what):
            times_left -= 1
            if times_left == 0:
                _kill()

    crash_points.point = point
    put = AnswerSlot.put

    def put_and_tell(slot: AnswerSlot, data: bytes, num_waiting: int) -> bool:
        is_put = put(slot, data, num_waiting)
        point("after", "put")
        return is_put

    class ArmedCount:
        """The counts of small parts. Within one, all is stored but the bytes of the answer, which decide."""

        size, iter_unpack = slots._COUNT.size, slots._COUNT.iter_unpack
        unpack_from, _pack_into = slots._COUNT.unpack_from, slots._COUNT.pack_into

        def pack_into(self, memory: mmap.mmap, place: int, *numbers: int) -> None:
            *others, part_bytes, _ = numbers
            if part_bytes:
                point("before", "count of a small part")
                self._pack_into(memory, place, *others, part_bytes, self.unpack_from(memory, place)[-1])
                point("within", "count of a small part")
            self._pack_into(memory, place, *numbers)
            if part_bytes:
                point("after", "count of a small part")

    AnswerSlot.put = put_and_tell  # type: ignore[method-assign]
    slots._COUNT = ArmedCount()  # type: ignore[assignment]


if "PENSTOCK_GATEWAY_KEEPER" in os.environ and "FAULTS_OF_GATEWAYS" in os.environ:
    _arm()
