"""Lets the launcher ask a rank for the Python stacks of its threads, whatever it is doing.

A rank registers :mod:`faulthandler` on a real-time signal, with a file in the run directory. That works
without tracing rights, while a native call holds the interpreter's lock, and in containers. The handler in
front of it (``_stacks``) says whether the interrupted thread holds the lock and where the answer ends, and
survives a walk through frames that are just being made, of which a process would else die.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import importlib.util
import os
import threading

# Neither glibc (32, 33) nor Python, a JVM (62) or valgrind (64) use it.
DEFAULT_SIGNAL = 54
# Where programs that close what they did not open, or use select, have no business.
FIRST_FD = 900


def register() -> None:
    """Called once by a rank, before its program runs. A rank that can not be asked runs all the same."""
    number, directory, rank = signal_number(), os.environ.get("TPURUN_RUN_DIR"), os.environ.get("RANK", "")
    if not number or not directory or not rank.isdecimal():
        return
    with contextlib.suppress(ImportError, OSError, ValueError, RuntimeError):
        from tpurun import _stacks

        fd = open_high(os.path.join(directory, "stacks", f"rank-{int(rank):04}.txt"))
        # Python restarts what the signal interrupts only without `chain`.
        faulthandler.register(number, fd, all_threads=True, chain=False)
        _stacks.answer(number, fd)
        # By the number of its descriptor the launcher sees whether the file is still the one behind it, and
        # by the folder of torch what the user has not written, wherever it is installed.
        main = f"pid {os.getpid()} fd {fd} main {threading.get_ident():#018x}"
        os.write(fd, os.fsencode(f"tpurun: {main} torch {folder_of_torch()}\n"))


def signal_number() -> int:
    """TPURUN_STACK_SIGNAL: a real-time signal from 36 to 63, 0 for none, as the launcher reads it, too.

    The launcher refuses other texts before it starts a rank.
    """
    text = os.environ.get("TPURUN_STACK_SIGNAL", "")
    number = int(text) if text.isascii() and text.isdigit() else -1
    return number if number == 0 or 36 <= number <= 63 else DEFAULT_SIGNAL


def folder_of_torch() -> str:
    """Empty without torch, which is not imported for this."""
    spec = importlib.util.find_spec("torch")
    return os.path.dirname(spec.origin) if spec is not None and spec.origin else ""


def open_high(path: str) -> int:
    """Opens a file for appending, under a high number where the limit allows one."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FIRST_FD)
    except OSError:
        return fd
    os.close(fd)
    return high
