"""The memory of the machine that a job could have."""

from __future__ import annotations

import os
import re
from pathlib import Path


def available_mib() -> float:
    """Returns the memory that a job could have.

    MemAvailable lacks the free pages that the kernel keeps for each CPU. After a large job these are
    gigabytes, from which the next one gets its memory first.
    """
    kept = kept_for_cpus(Path("/proc/zoneinfo").read_text()) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) / 1024 + kept
    raise OSError("/proc/meminfo has no MemAvailable")


def kept_for_cpus(zoneinfo: str) -> int:
    """Returns the number of free pages that are kept for one CPU each."""
    return sum(int(count) for count in re.findall(r"^ +count: +(\d+)$", zoneinfo, re.MULTILINE))
