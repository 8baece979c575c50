"""The warning that other processes use the cores of a model's threads."""

from __future__ import annotations

import logging

_log = logging.getLogger(__name__)

_RECOVERY_S = 5.0
"""Seconds of steps after packing in which a model may still leave out threads whose cores are free again."""


class CrowdedCores:
    """Warns once if threads are left out of steps because their cores are busy, except with the model's own packing."""

    def __init__(self, num_threads: int) -> None:
        """num_threads: those of the model."""
        self._num_threads = num_threads
        self._recovery_s = 0.0
        self._is_warned = False

    def note_step(self, num_in_use: int, took_s: float, *, packs: bool) -> None:
        """Note how many threads computed a step, and whether the model's weights were packed meanwhile."""
        if packs:
            self._recovery_s = _RECOVERY_S
        elif num_in_use == self._num_threads:
            self._recovery_s = 0.0
        elif self._recovery_s > 0:
            self._recovery_s -= took_s
        elif num_in_use > 0 and not self._is_warned:
            self._is_warned = True
            extra = {"num_threads": self._num_threads, "num_in_use": num_in_use}
            _log.warning("other processes use the cores", extra=extra)
