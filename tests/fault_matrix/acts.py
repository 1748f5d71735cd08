"""The acts of a guilty rank that are no operations."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable

from .cells import AWAY_S

COMPUTE_S = 0.01


def compute(seconds: float) -> None:
    """Really: uses the CPU until this much of it was received, whatever else runs."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        sum(range(1000))


def loop() -> None:
    """For ever, as far as the others can tell: it has an end so that one job can run many cells."""
    end = time.monotonic() + AWAY_S
    while time.monotonic() < end:
        sum(range(1000))


def hold_gil() -> None:
    """Calls into C that do not give the lock away; a signal ends each of them early."""
    usleep = ctypes.PyDLL(None).usleep
    end = time.monotonic() + AWAY_S
    while (left := end - time.monotonic()) > 0:
        usleep(int(left * 1e6))


def fail() -> None:
    raise ValueError("the guilty rank was told to raise this")


ACTS: dict[str, Callable[[], object]] = {
    "compute": lambda: compute(COMPUTE_S),
    "compute_x20": lambda: compute(20 * COMPUTE_S),
    "loop": loop,
    "hold_gil": hold_gil,
    "raise": fail,
    "exit0_early": lambda: sys.exit(0),
    "sigkill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "sigsegv": lambda: ctypes.string_at(0),
    "sigstop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}
