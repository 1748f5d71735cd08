"""Which compiler the tests of torch.compile use, and whether the mode that fuses is there."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

# In two parts: to import a module that names the device is to claim it.
DEVICE = "t" + "pu"
# Another one, such as aot_eager, shows whether a test itself is right.
BACKEND = os.environ.get("TPURUN_TEST_BACKEND", DEVICE)
# The compilers that run the traced operations one by one do not know the line of each in the program.
KNOWS_LINES = BACKEND == DEVICE


_REFUSAL = "DEFER_AND_FUSE does not exist here yet"


def _why_not_fused() -> str:
    """Why there is no mode that fuses, or an empty text.

    The source says so: to ask the package would import what a process has to import after it has the device.
    """
    package = Path(importlib.util.find_spec("tpurun").origin).parent
    return _REFUSAL if _REFUSAL in (package / "tpu" / "_eager.py").read_text() else ""


WHY_NOT_FUSED = _why_not_fused()
