"""How a process comes to have device ``tpu``, and why a program that never says ``tpu`` does not get it.

Once torch knows a device of that name, it is the accelerator of the process, and programs that are written
for whatever accelerator there is change what they do. So the name is claimed by whoever asks for it: a
program whose own text or arguments say ``tpu``, the first use of ``torch.tpu``, ``tpurun --device tpu``, or
``TPURUN_DEVICE=1``. ``TPURUN_DEVICE=0`` keeps it from everybody.
"""

from __future__ import annotations

import ast
import atexit
import importlib
import importlib.util
import os
import re
import sys
import warnings
from types import ModuleType
from typing import Any

SWITCH = "TPURUN_DEVICE"
_SAYS_DEVICE = re.compile(r"tpu(:\d*)?")
# Among arguments: --device tpu, --device=tpu:0.
_SAYS_WORD = re.compile(r"(?:^|[\s=,])tpu(?::\d*)?(?:$|[\s,])")
# Where "tpu" is the name of a backend, which serves CPU tensors as well.
_NAME_BACKENDS = frozenset({"init_process_group", "is_backend_available", "new_group"})
_is_claimed = False
# Where ranks are forked from, the device is theirs to claim.
is_left_to_ranks = False


def announce() -> None:
    """Put ``torch.tpu`` in place, which claims the device when something of it is used; cheap."""
    if is_left_to_ranks:
        return
    import torch

    from tpurun import _backend

    if hasattr(torch, "tpu") or _backend.google_tpu_is_here():
        return
    placeholder = _Unclaimed("torch.tpu")
    torch.tpu = placeholder
    sys.modules.setdefault("torch.tpu", placeholder)
    if os.environ.get(SWITCH, "") not in ("", "0"):
        claim()


def claim_if_named(arguments: list[str], text: str | None = None) -> None:
    """Claim the device when the program names it, or its arguments do.

    Its ``text`` is that of the file that runs as ``__main__``, unless given.
    """
    if os.environ.get(SWITCH) == "0" or _is_claimed or is_left_to_ranks or not _is_built():
        return
    source = _text_of(sys.modules.get("__main__")) if text is None else text.encode()
    if any(map(_SAYS_WORD.search, arguments)) or _says_tpu(source):
        claim()


def claim_if_interpreter_names_it() -> None:
    """The same for a program that was given to the interpreter, as a file, a module or a text."""
    arguments = sys.argv[1:]
    if sys.argv[:1] == ["-c"]:
        claim_if_named(arguments, sys.orig_argv[-len(sys.argv)].removeprefix("-c"))
    else:
        claim_if_named(arguments)


def claim() -> None:
    """Give this process device ``tpu``; does nothing when it has it."""
    global _is_claimed
    if _is_claimed:
        return
    if os.environ.get(SWITCH) == "0":
        raise RuntimeError(f"tpurun: device tpu is switched off by {SWITCH}=0; unset it to use torch.tpu")
    import torch

    taken = torch._C._get_privateuse1_backend_name()
    if taken != "privateuseone":
        raise RuntimeError(
            f"tpurun: expected that nobody has claimed PyTorch's device for out-of-tree backends, but it is "
            f"{taken!r} here; uninstall that backend, or set {SWITCH}=0 to run without device tpu"
        )
    from tpurun import _backend

    native = _backend.load_native()
    native.claim_device(_devices(), _memory_bytes())
    _is_claimed = True
    # The others count on what this process has begun.
    atexit.register(native.settle_device)
    # From here on it is the accelerator, even of a torch that could have CUDA.
    torch.utils.rename_privateuse1_backend("tpu")
    module = importlib.import_module("tpurun.tpu")
    sys.modules["torch.tpu"] = module
    if isinstance(getattr(torch, "tpu", None), _Unclaimed):
        del torch.tpu
    torch._register_device_module("tpu", module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    _backend.serve_device()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        warnings.warn(
            "tpurun: device tpu was first used after init_process_group(): the groups that there are serve "
            f"CPU tensors alone; use torch.tpu before, or set {SWITCH}=1",
            stacklevel=3,
        )


class _Unclaimed(ModuleType):
    """Stands for ``torch.tpu`` until something of it is used."""

    # Its submodules are found without the device.
    __path__ = (os.path.join(os.path.dirname(__file__), "tpu"),)

    def __getattr__(self, name: str) -> Any:
        # Not for those who only look around, as import machinery and inspect do.
        if name.startswith("__"):
            raise AttributeError(name)
        claim()
        return getattr(sys.modules["torch.tpu"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("__") or isinstance(value, ModuleType):
            super().__setattr__(name, value)
        else:
            claim()
            setattr(sys.modules["torch.tpu"], name, value)


def _devices() -> int:
    """A rank may call its device ``tpu:LOCAL_RANK``, as scripts for other accelerators do."""
    try:
        return max(1, min(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 127))
    except ValueError:
        return 1


_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def _memory_bytes() -> int:
    """What TPURUN_HBM says ("16GiB"), else all the memory of the host."""
    given = os.environ.get("TPURUN_HBM")
    if given is None:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", given)
    if match is None or (size := int(float(match[1]) * _UNITS[match[2]])) < 2**20:
        raise RuntimeError(
            f"tpurun: expected TPURUN_HBM (--hbm) as a size of at least 1MiB like 16GiB, got {given!r}"
        )
    return size


def _is_built() -> bool:
    """A source copy without compiled parts has no device, and need not say so to those who did not ask."""
    return importlib.util.find_spec("tpurun._build") is not None


def _text_of(program: ModuleType | None) -> bytes:
    path = getattr(program, "__file__", None)
    if path is None or not path.endswith(".py"):
        return b""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def _says_tpu(source: bytes) -> bool:
    """Whether a program names the device: ``"tpu"``, ``"tpu:0"``, ``f"tpu:{i}"``, ``torch.tpu``."""
    if b"tpu" not in source:
        return False
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return False
    backends = {id(name) for node in ast.walk(tree) for name in _backend_names(node)}
    return any(_names_device(node) for node in ast.walk(tree) if id(node) not in backends)


def _backend_names(node: ast.AST) -> list[ast.expr]:
    if not isinstance(node, ast.Call):
        return []
    function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
    if function not in _NAME_BACKENDS:
        return []
    return node.args[:1] + [keyword.value for keyword in node.keywords if keyword.arg == "backend"]


def _names_device(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and _SAYS_DEVICE.fullmatch(node.value) is not None
    if isinstance(node, ast.Import):
        return any(name.name.startswith("torch.tpu") for name in node.names)
    if isinstance(node, ast.ImportFrom):
        return (node.module or "").startswith("torch.tpu")
    return isinstance(node, ast.Attribute) and node.attr == "tpu"
