"""Google's torch_tpu on a machine without TPUs: kept from loading, or named where it is in the way.

``import torch`` loads it wherever it is installed. Without libtpu that ends the process. With libtpu it takes
many seconds, and its libraries take torch's slot for out-of-tree devices although they have no device.
Where there are chips, device and backends are its own, and nothing here changes anything.
"""

from __future__ import annotations

import contextlib
import glob
import importlib.util
import os
import sys

NAME = "torch_tpu"
# Holds a package of that name that loads nothing.
EMPTY = os.path.join(os.path.dirname(__file__), "without_chips")
_ROOT = "/"
_GOOGLE = "0x1ae0"  # as a vendor of PCI devices


def keep_out() -> None:
    """Have ``import torch`` find an empty torch_tpu, here and in processes that this one starts. Repeatable.

    Nothing happens where it is imported already, where there is none, or where there are chips.
    """
    if NAME in sys.modules or EMPTY in sys.path:
        return
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(NAME)
        if spec is None or has_chips():
            return
        home = os.path.dirname(os.path.dirname(spec.origin or ""))
        # The first place stays the program's.
        sys.path.insert(sys.path.index(home) if home in sys.path else 0, EMPTY)
        given = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = f"{EMPTY}{os.pathsep}{given}" if given else EMPTY


def has_library() -> bool:
    """Whether it finds libtpu, without which it ends the process."""
    return "TPU_LIBRARY_PATH" in os.environ or importlib.util.find_spec("libtpu") is not None


def is_installed() -> bool:
    """Whether Google's own is found, or was before it was kept out."""
    return EMPTY in sys.path or importlib.util.find_spec(NAME) is not None


def is_in_charge() -> bool:
    """Whether Google's own is installed and has chips, so that device and backends are its own."""
    return is_installed() and has_chips()


def is_in_the_way() -> bool:
    """Whether it was loaded although there are no chips, and its libraries have taken what a device needs."""
    path = getattr(sys.modules.get(NAME), "__file__", None)
    if path is None or path.startswith(EMPTY) or has_chips():
        return False
    import torch

    return torch._C._dispatch_has_backend_fallback(torch._C.DispatchKey.SparsePrivateUse1)


def why_in_the_way() -> str:
    """The line that helps."""
    return (
        "tpurun: `import torch` has loaded Google's torch_tpu, which takes the place of device tpu although "
        "there is no TPU here; start the program with tpurun, put `import tpurun` before `import torch`, or "
        "uninstall torch_tpu"
    )


def has_chips() -> bool:
    """Whether this machine has TPUs that torch_tpu would use."""
    if glob.glob(os.path.join(_ROOT, "dev/accel[0-9]*")):
        return True
    groups = {os.path.basename(path) for path in glob.glob(os.path.join(_ROOT, "dev/vfio/[0-9]*"))}
    if not groups:
        return False
    devices = glob.glob(os.path.join(_ROOT, "sys/bus/pci/devices/*"))
    return any(_vendor_of(device) == _GOOGLE and _group_of(device) in groups for device in devices)


def _vendor_of(device: str) -> str | None:
    try:
        with open(os.path.join(device, "vendor"), encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return None


def _group_of(device: str) -> str | None:
    try:
        return os.path.basename(os.readlink(os.path.join(device, "iommu_group")))
    except OSError:
        return None
