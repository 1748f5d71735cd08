"""The compiler that the tests of torch.compile use."""

from __future__ import annotations

import os

# In two parts: to import a module that names the device is to claim it.
DEVICE = "t" + "pu"
# Another one, such as aot_eager, shows whether a test itself is right.
BACKEND = os.environ.get("TPURUN_TEST_BACKEND", DEVICE)
# The compilers that run the traced operations one by one do not know the line of each in the program.
KNOWS_LINES = BACKEND == DEVICE
