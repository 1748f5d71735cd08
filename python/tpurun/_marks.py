"""When this rank reached the steps of its start that only Python knows of: ``tpurun --timings`` shows them.

Each is a word of the launcher's board, told in CLOCK_MONOTONIC and written once. TPURUN_MARKS_AT says where
the first of them lies; the board is the descriptor in TPURUN_BOARD_FD.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time

# In the order of `Mark` in collectives/protocol/src/board/marks.rs.
SCRIPT_ENTERED = 0
GROUP_CREATED = 1

_reached: set[int] = set()


def reach(step: int) -> None:
    """Mark a step, when it is the first time. A rank that can not say so runs all the same."""
    if step in _reached:
        return
    _reached.add(step)
    # A process that a rank forked has the same variables, but is not the rank.
    if os.environ.get("TPURUN_RANK_PID", str(os.getpid())) != str(os.getpid()):
        return
    now = struct.pack("=Q", time.clock_gettime_ns(time.CLOCK_MONOTONIC))
    with contextlib.suppress(KeyError, OSError, ValueError):
        fd, at = int(os.environ["TPURUN_BOARD_FD"]), int(os.environ["TPURUN_MARKS_AT"])
        # The program may have closed the descriptor, and the number may be another file's by now.
        if os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:tpurun-board"):
            os.pwrite(fd, now, at + 8 * step)
