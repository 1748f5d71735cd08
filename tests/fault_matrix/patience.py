"""How much of the machine others use meanwhile: limits of time hold for a machine of one's own."""

from __future__ import annotations

import os
import time
from pathlib import Path


class Clock:
    """Measures how much of the machine others use while a job runs."""

    def __init__(self) -> None:
        self._at, self._ours, self._all = self._read()

    def patience(self) -> float:
        """How much longer everything takes because of others; 1 when there are none."""
        at, ours, everybodys = self._read()
        others = max(0.0, (everybodys - self._all) - (ours - self._ours))
        available = (at - self._at) * (os.cpu_count() or 1)
        return 1 / (1 - min(others / available, 0.9))

    @staticmethod
    def _read() -> tuple[float, float, float]:
        # `steal` is what a host took for its other machines.
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(
            int, Path("/proc/stat").read_text().split(maxsplit=9)[1:9]
        )
        busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
        times = os.times()
        return time.monotonic(), times.children_user + times.children_system, busy
