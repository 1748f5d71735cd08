"""Found in the place of Google's torch_tpu on a machine without TPUs, where that can not be loaded.

Device ``tpu`` is tpurun's there, and ``torch.tpu`` has the names that programs use.
"""

from __future__ import annotations

from typing import NoReturn


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(
        f"tpurun: Google's torch_tpu is kept from loading, because there is no TPU here; this has no "
        f"{name!r}, use torch.tpu"
    )
