"""How a process comes to have device ``tpu``, and why a program that never says ``tpu`` does not get it.

Once torch knows a device of that name, it is the accelerator of the process, and programs that are written
for whatever accelerator there is change what they do. So the name is claimed by whoever asks for it: a
program whose own text or arguments say ``tpu``, the first use of ``torch.tpu`` that is more than a question,
``tpurun --device tpu``, or ``TPURUN_DEVICE=1``. ``TPURUN_DEVICE=0`` keeps it from everybody.
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
from collections.abc import Callable
from types import ModuleType
from typing import Any

SWITCH = "TPURUN_DEVICE"
_SAYS_DEVICE = re.compile(r"tpu(:\d*)?")
# Among arguments: --device tpu, --device=tpu:0.
_SAYS_WORD = re.compile(r"(?:^|[\s=,])tpu(?::\d*)?(?:$|[\s,])")
# Where "tpu" is the name of a backend, which serves CPU tensors as well.
_NAME_BACKENDS = frozenset({"init_process_group", "is_backend_available", "new_group"})
# Functions that only ask whether something has a name.
_ASK_FOR_NAMES = frozenset({"getattr", "hasattr"})
# As many as torch can count.
MAX_DEVICES = 127
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
    global _seed_at_start
    _seed_at_start = torch.initial_seed()
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
        raise RuntimeError(
            f"tpurun: device tpu is switched off by {SWITCH}=0; unset it, or use --device tpu, to have it"
        )
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
    _seed(module, torch.initial_seed())
    _backend.serve_device()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        warnings.warn(
            "tpurun: device tpu was first used after init_process_group(): the groups that there are serve "
            f"CPU tensors alone; use torch.tpu before, or set {SWITCH}=1",
            stacklevel=3,
        )


# The seed of torch when the program began, and the last one for the device alone with that of torch then.
_seed_at_start: int | None = None
_seed_before: tuple[int, int] | None = None


def _seed(module: ModuleType, of_torch: int) -> None:
    """Seed the generators as if the device had been there when the program seeded torch."""
    if _seed_before is not None and _seed_before[1] == of_torch:
        module.manual_seed_all(_seed_before[0])
    elif _seed_at_start not in (None, of_torch):
        module.manual_seed_all(of_torch)


def _remember_seed(seed: int) -> None:
    global _seed_before
    import torch

    _seed_before = int(seed), torch.initial_seed()


def _can_be_had() -> bool:
    """Whether a claim would succeed."""
    import torch

    is_free = torch._C._get_privateuse1_backend_name() == "privateuseone"
    return os.environ.get(SWITCH) != "0" and is_free and _is_built()


def _nothing(_device: Any = None) -> None:
    """There is nothing yet that could be waited for or given back."""


# What libraries ask of every accelerator that there is: answered without the device.
_ANSWERS: dict[str, Callable[..., Any]] = {
    "_is_in_bad_fork": lambda: False,
    "current_device": lambda: 0,
    "device_count": lambda: _devices() if _can_be_had() else 0,
    "empty_cache": _nothing,
    "is_available": _can_be_had,
    "is_bf16_supported": lambda _including_emulation=True: _can_be_had(),
    "is_initialized": lambda: False,
    "manual_seed": _remember_seed,
    "manual_seed_all": _remember_seed,
    "memory_allocated": lambda _device=None: 0,
    "synchronize": _nothing,
}


def _answer(name: str) -> Callable[..., Any]:
    """Answers as long as there is no device, also for those who keep the function."""

    def answer(*arguments: Any, **named: Any) -> Any:
        if _is_claimed:
            return getattr(sys.modules["torch.tpu"], name)(*arguments, **named)
        return _ANSWERS[name](*arguments, **named)

    answer.__name__ = answer.__qualname__ = name
    return answer


# What torch says of a device name that nobody has claimed.
_REFUSED = re.compile(r"device string: '?tpu\b|\(tagged with tpu\b")


def note_on_refusal(error: BaseException) -> str | None:
    """What helps where torch refused the name because the program did not show that it uses it."""
    if _is_claimed or is_left_to_ranks or "torch" not in sys.modules:
        return None
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if isinstance(link, RuntimeError) and _REFUSED.search(str(link)):
            return _why_refused()
        link = link.__cause__ or link.__context__
    return None


def _why_refused() -> str:
    if os.environ.get(SWITCH) == "0":
        return f"tpurun: device tpu is switched off by {SWITCH}=0; unset it, or use --device tpu, to have it"
    return (
        f"tpurun: nothing in the program showed that it uses device tpu; start it with --device tpu, or with "
        f"{SWITCH}=1, to have it"
    )


class _Unclaimed(ModuleType):
    """Stands for ``torch.tpu`` until something of it is used."""

    # Its submodules are found without the device.
    __path__ = (os.path.join(os.path.dirname(__file__), "tpu"),)

    def __getattr__(self, name: str) -> Any:
        # Not for those who only look around, as import machinery and inspect do.
        if name.startswith("__"):
            raise AttributeError(name)
        # A person at a prompt who asks is going to use it, and there is no text that would say so.
        if not _is_claimed and name in _ANSWERS and not hasattr(sys, "ps1"):
            return _answer(name)
        claim()
        return getattr(sys.modules["torch.tpu"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("__") or isinstance(value, ModuleType):
            super().__setattr__(name, value)
        else:
            claim()
            setattr(sys.modules["torch.tpu"], name, value)


def _devices() -> int:
    """How many names the device has.

    A rank may call its device ``tpu:LOCAL_RANK``, as scripts for other accelerators do. TPURUN_DEVICES is for
    a program that starts its ranks itself, as many as there are devices.
    """
    return max(_ranks_of_host(), _named_devices())


def _ranks_of_host() -> int:
    try:
        return max(1, min(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), MAX_DEVICES))
    except ValueError:
        return 1


def _named_devices() -> int:
    given = os.environ.get("TPURUN_DEVICES")
    if not given:
        return 1
    if not (given.isascii() and given.isdigit() and 1 <= int(given) <= MAX_DEVICES):
        raise RuntimeError(
            f"tpurun: expected TPURUN_DEVICES as a number from 1 to {MAX_DEVICES}, got {given!r}; it is how "
            "many devices tpu:0, tpu:1, .. a program may name"
        )
    return int(given)


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
    others = {id(name) for node in ast.walk(tree) for name in (*_backend_names(node), *_questions(node))}
    return any(_names_device(node) for node in ast.walk(tree) if id(node) not in others)


def _backend_names(node: ast.AST) -> list[ast.expr]:
    if not isinstance(node, ast.Call):
        return []
    function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
    if function not in _NAME_BACKENDS:
        return []
    return node.args[:1] + [keyword.value for keyword in node.keywords if keyword.arg == "backend"]


def _questions(node: ast.AST) -> list[ast.expr]:
    """Names in ``torch.tpu.is_available()`` and ``hasattr(torch, "tpu")``."""
    if isinstance(node, ast.Attribute) and node.attr in _ANSWERS:
        return [node.value]
    if isinstance(node, ast.Call) and getattr(node.func, "id", None) in _ASK_FOR_NAMES:
        return node.args[1:2]
    return []


def _names_device(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and _SAYS_DEVICE.fullmatch(node.value) is not None
    if isinstance(node, ast.Import):
        return any(name.name.startswith("torch.tpu") for name in node.names)
    if isinstance(node, ast.ImportFrom):
        return (node.module or "").startswith("torch.tpu")
    return isinstance(node, ast.Attribute) and node.attr == "tpu"
